"""Where to spend tokens: acquisition rules, the plan of a round, and the ledger.

`focus.branching.plan` is the module; its function is `focus.branching.plan.plan`.
"""

from focus.branching.acquisition import RULES, AcquisitionRule
from focus.branching.budget import BudgetExceeded, Ledger, TokenBudget
from focus.branching.features import StateFeatures, cut_points, state_weights
from focus.branching.plan import Plan, condition

__all__ = [
    "RULES",
    "AcquisitionRule",
    "BudgetExceeded",
    "Ledger",
    "Plan",
    "StateFeatures",
    "TokenBudget",
    "condition",
    "cut_points",
    "state_weights",
]
