"""Arms of the laboratory: what a method does with the tokens of a step."""

from __future__ import annotations

import dataclasses
from typing import Any

from focus.branching.acquisition import RULES
from focus.credit.refine import REFINE_MODES
from focus.credit.registry import ESTIMATORS, check_hparams

NO_BRANCHES = "none"
NORMALISE = ("none", "rms", "running")
OPTIMIZERS = ("sgd", "adam")
WEIGHTS = ("score_norm", "tokens")


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method. Hashable, closed over by compiled functions.

    Attributes:
      name: what a report calls it.
      estimator: key of `ESTIMATORS`.
      hparams: of the estimator, pairs of name and value.
      group_size: base rollouts of one task.
      rule: key of `RULES` that says where to branch, or "none".
      base_fraction: share of the budget that base rollouts are launched for.
      ks: continuations that one pick may add.
      max_per_state: most continuations of one state.
      max_picks: most states that are branched in a step.
      weights: what an error of V weighs by: "score_norm", or "tokens".
      alive_only: whether states that can be seen to be lost are left out of the pool.
      task_share: share of an error's variance that is the task's: shared by all of its states.
      refine: "none", "local" or "joint".
      siblings: whether outcomes of a task's other rollouts refine the value of its start.
      train_on_branches: whether the policy learns from branches.
      kept: share of the critic's counts that stays from step to step.
      look_weight: see `focus.lab.critic.belief`.
      weight: see `focus.lab.critic.belief`.
      critic_warmup: episodes that the critic learns from before the first step, at no token;
        demonstrations, as a warm start of the policy plays them.
      normalise: what advantages are divided by: nothing, their own root mean square in the step,
        or its running mean.
      optimizer: "sgd" or "adam".
    """

    name: str
    estimator: str
    hparams: tuple[tuple[str, Any], ...] = ()
    group_size: int = 1
    rule: str = NO_BRANCHES
    base_fraction: float = 1.0
    ks: tuple[int, ...] = (4,)
    max_per_state: int = 4
    max_picks: int = 24
    weights: str = "score_norm"
    alive_only: bool = False
    task_share: float = 0.0
    refine: str = "joint"
    siblings: bool = False
    train_on_branches: bool = True
    kept: float = 0.85
    look_weight: float = 1.0
    weight: float = 2.0
    critic_warmup: int = 0
    normalise: str = "rms"
    optimizer: str = "sgd"

    def __post_init__(self):
        def one_of(name, choices):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(
                    f"arm {self.name}: {name}={value!r}; choose one of {', '.join(choices)}"
                )

        one_of("estimator", tuple(ESTIMATORS))
        one_of("rule", (NO_BRANCHES, *RULES))
        one_of("refine", REFINE_MODES)
        one_of("normalise", NORMALISE)
        one_of("optimizer", OPTIMIZERS)
        one_of("weights", WEIGHTS)
        check_hparams(self.estimator, dict(self.hparams), user=f"arm {self.name}: ")
        for name, low, high in (
            ("group_size", 1, None),
            ("max_per_state", 1, None),
            ("max_picks", 1, None),
            ("base_fraction", 0.0, 1.0),
            ("task_share", 0.0, 1.0),
            ("kept", 0.0, 1.0),
            ("weight", 1e-6, None),
            ("look_weight", 1e-6, None),
            ("critic_warmup", 0, None),
        ):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                most = "" if high is None else f" and <= {high}"
                raise ValueError(f"arm {self.name}: {name}={value} must be >= {low}{most}")
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"arm {self.name}: ks={self.ks} must be numbers >= 1")
        if not self.branches and "mc_return" in ESTIMATORS[self.estimator].inputs:
            raise ValueError(
                f"arm {self.name}: {self.estimator} reads continuations, and rule='none' samples "
                f"none; choose one of {', '.join(RULES)}"
            )

    @property
    def branches(self) -> bool:
        """Whether it branches."""
        return self.rule != NO_BRANCHES

    @property
    def reads_values(self) -> bool:
        """Whether its estimator reads the critic."""
        return "value" in ESTIMATORS[self.estimator].inputs


# Episodes of the first policy that a critic learns from before the first step, at no token: a warm
# start has played many more. Every arm with a critic gets them.
_WARMUP = 400
_TRUST = (("lambda_mode", "trust"),)


def _fixed(lambda_: float) -> tuple[tuple[str, Any], ...]:
    return (("lambda_", lambda_),)


def _focus(name: str, **options: Any) -> Arm:
    """FOCUS as the laboratory finds it best, but for `options`; see docs/lab.md."""
    defaults = dict(
        estimator="focus",
        hparams=_TRUST,
        rule="expected_error_reduction",
        base_fraction=0.5,
        ks=(1,),
        max_per_state=1,
        max_picks=96,
        critic_warmup=_WARMUP,
    )
    return Arm(name, **{**defaults, **options})


_ALL = (
    Arm("grpo", "dr_grpo", group_size=8, normalise="none"),
    Arm("grpo_std", "grpo", group_size=8, normalise="none"),
    Arm("rloo", "rloo", group_size=8, normalise="none"),
    Arm("ppo", "ppo", hparams=_fixed(0.95), critic_warmup=_WARMUP),
    Arm("ppo_cold", "ppo", hparams=_fixed(0.95)),
    # The strongest arm without branches: what branches have to beat.
    Arm("ppo_trust", "focus", hparams=_TRUST, critic_warmup=_WARMUP),
    Arm(
        "vineppo", "vineppo", rule="uniform", base_fraction=0.15, ks=(3,), max_per_state=3,
        max_picks=80, train_on_branches=False,
    ),
    _focus("focus"),
    _focus("focus_cold", critic_warmup=0),
    _focus("focus_lambda_0", hparams=_fixed(0.0)),
    _focus("focus_lambda_50", hparams=_fixed(0.5)),
    _focus("focus_lambda_95", hparams=_fixed(0.95)),
    _focus("focus_lambda_100", hparams=_fixed(1.0)),
    _focus("focus_k4", ks=(4,), max_per_state=4, max_picks=24),
    _focus("focus_few_branches", base_fraction=0.75),
    _focus("focus_task_errors", task_share=0.9),
    _focus("focus_tokens", weights="tokens"),
    _focus("focus_alive", alive_only=True),
    _focus("focus_random", rule="random"),
    _focus("focus_random_alive", rule="random", alive_only=True),
    _focus("focus_bernoulli", rule="bernoulli"),
    _focus("focus_epistemic", rule="epistemic"),
    _focus("focus_variance_reduction", rule="variance_reduction"),
    _focus("focus_policy_entropy", rule="policy_entropy"),
    _focus("focus_policy_improvement", rule="policy_improvement"),
    _focus("focus_mixed_outcome", rule="mixed_outcome"),
    _focus("focus_uniform", rule="uniform"),
    _focus("focus_idle_branches", train_on_branches=False),
)  # fmt: skip
ARMS: dict[str, Arm] = {arm.name: arm for arm in _ALL}
