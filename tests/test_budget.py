"""The ledger adds up, and no interleaving of requests passes the budget."""

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from focus.branching.budget import TOKEN_COLUMNS, BudgetExceeded, Ledger, TokenBudget

PROPERTY = settings(deadline=None, max_examples=30)
ledgers = st.builds(
    Ledger,
    **{name: st.integers(0, 1000) for name in TOKEN_COLUMNS},
    seconds=st.dictionaries(st.sampled_from(["rollout", "update"]), st.integers(0, 9)),
)


@PROPERTY
@given(ledgers, ledgers, ledgers)
def test_merging_ledgers_is_a_sum_in_any_order(a, b, c):
    assert (a + b) + c == a + (b + c) == sum([c, b, a], Ledger())
    assert (a + b).spent == a.spent + b.spent
    assert a + Ledger() == a


def test_only_what_the_policy_generated_counts_against_the_budget():
    ledger = Ledger(base=5, branch=3, summary=2, observation=50, prefill=70, cached=90,
                    discarded=4, replayed=8, seconds={"rollout": 1.5})  # fmt: skip
    assert ledger.spent == 10
    assert ledger.remaining(12) == 2
    flat = ledger.to_dict()
    assert flat["tokens/spent"] == 10 and flat["tokens/cached"] == 90
    assert flat["seconds/rollout"] == 1.5
    assert [name for name, _, _ in ledger.rows()] == [*TOKEN_COLUMNS, "spent", "rollout"]
    assert ("rollout", "1.50", "s") in ledger.rows()


@pytest.mark.parametrize("column", TOKEN_COLUMNS)
def test_a_charge_that_would_pass_the_budget_is_refused_whole(column):
    ledger = Ledger(base=6)
    charge = Ledger(**{column: 5})
    if column in ("base", "branch", "summary"):
        with pytest.raises(
            BudgetExceeded, match="5 tokens to 6 passes the budget of 10; at most 4"
        ):
            ledger.charge(charge, budget=10)
        assert ledger == Ledger(base=6)
        assert ledger.charge(charge, budget=11).remaining(11) == 0
    else:
        assert ledger.charge(charge, budget=6).spent == 6


def test_a_ledger_past_its_budget_says_so():
    with pytest.raises(BudgetExceeded, match="7 tokens were generated, the budget is 6"):
        Ledger(base=7).remaining(6)


@pytest.mark.parametrize("bad", [-1, 1.5, True, None])
def test_columns_are_whole_numbers(bad):
    with pytest.raises(ValueError, match="branch must be a whole number"):
        Ledger(branch=bad)
    with pytest.raises(ValueError, match="'rollout' must be >= 0"):
        Ledger(seconds={"rollout": -0.1})


def test_a_ledger_is_a_value():
    seconds = {"rollout": 1.0}
    ledger = Ledger(base=1, seconds=seconds)
    seconds["rollout"] = 5.0
    assert ledger.seconds["rollout"] == 1.0
    assert pickle.loads(pickle.dumps(ledger)) == copy.deepcopy(ledger) == ledger


def test_pitfall_23_after_an_abort_the_resume_may_ask_for_what_is_left():
    granted, budget = TokenBudget(total=10).reserve(10)
    assert granted == 10 and budget.reserve(1)[0] == 0
    budget = budget.settle(granted, used=6)
    assert budget.reserve(10)[0] == 4


def test_settling_what_was_not_granted_or_more_than_granted_is_refused():
    granted, budget = TokenBudget(total=10).reserve(4)
    with pytest.raises(BudgetExceeded, match="granted 4 tokens generated 5"):
        budget.settle(granted, used=5)
    with pytest.raises(ValueError, match="settle each grant once"):
        budget.settle(granted, used=2).settle(granted, used=2)
    with pytest.raises(ValueError, match="want must be a whole number"):
        budget.reserve(-1)
    with pytest.raises(BudgetExceeded, match="passes the total of 3"):
        TokenBudget(total=3, spent=2, reserved=2)


class RequestsInFlight(RuleBasedStateMachine):
    """Requests start and end in any order; what they generate is counted on the side."""

    @initialize(total=st.integers(0, 200))
    def start(self, total):
        self.total, self.budget = total, TokenBudget(total=total)
        self.in_flight, self.generated = [], 0

    @rule(want=st.integers(0, 120))
    def request(self, want):
        available = self.total - self.generated - sum(self.in_flight)
        granted, self.budget = self.budget.reserve(want)
        assert granted == min(want, available)
        self.in_flight.append(granted)

    @rule(data=st.data())
    def finish(self, data):
        if not self.in_flight:
            return
        granted = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        used = data.draw(st.integers(0, granted))
        self.budget = self.budget.settle(granted, used)
        self.generated += used

    @invariant()
    def never_passes_the_total(self):
        assert self.budget.spent == self.generated
        assert self.budget.reserved == sum(self.in_flight)
        assert self.budget.spent + self.budget.reserved <= self.total
        assert self.budget.available >= 0


TestRequestsInFlight = RequestsInFlight.TestCase
TestRequestsInFlight.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)
