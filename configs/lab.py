"""The laboratory: arms against worlds with exact values, many seeds, minutes on two cores.

    python scripts/lab.py --config configs/lab.py --workdir runs/lab
    python scripts/lab.py --config configs/lab.py:claims --workdir runs/claims
    python scripts/lab.py --config configs/lab.py:smoke --workdir runs/smoke --config.seed=1

The argument names the experiment: basic (default; six arms in four worlds), smoke (everything
once, within a minute), claims (what the README says of the method, and whether it holds), league
(every estimator's credit against the true one), regime (where branching pays).

A world is `LABEL: NAME option=value ...` with the names and options of `focus.lab.worlds.WORLDS`,
an arm `LABEL: NAME field=value ...` with those of `focus.lab.arms.ARMS`; labels may be left out.
"""

import ml_collections

EXPERIMENTS = ("basic", "smoke", "claims", "league", "regime")

LONG = "long: fork_chain length=40 forks=8 delay=1 tasks=200"
# Of the league: of few tasks, so that its batches come by the same states.
LEAGUE_WORLDS = (
    "long: fork_chain length=40 forks=8 tasks=20",
    "late: fork_chain length=20 forks=5 delay=3 tasks=20 p0=0.68",
    "short: fork_chain length=8 forks=4 tasks=20 p0=0.8",
    "trap: grid_trap",
    "noisy: noisy_forks",
    "search: tool_search",
    "compaction: compaction",
)
WORLDS = (
    LONG,
    "late: fork_chain length=20 forks=5 delay=3 tasks=200 p0=0.68",
    "short: fork_chain length=8 forks=4 delay=1 tasks=200 p0=0.8",
    "trap: grid_trap",
    "noisy: noisy_forks",
    "search: tool_search",
    "compaction: compaction",
)


def get_config(experiment: str = "basic") -> ml_collections.ConfigDict:
    """The configuration of `experiment`; every key that can be set is here."""
    if experiment not in EXPERIMENTS:
        raise ValueError(
            f"unknown experiment {experiment!r}: choose one of {', '.join(EXPERIMENTS)}"
        )
    c = ml_collections.ConfigDict()
    c.seed = 0  # shifts all seeds
    c.cache_dir = ""  # where compiled programs are kept; "" is $FOCUS_CACHE or ~/.cache/focus
    c.worlds = (*WORLDS[:2], WORLDS[3], WORLDS[5])
    c.arms = ("grpo", "ppo", "vineppo", "focus_random", "focus_random_alive", "focus")
    c.ours = "focus"  # the arm that all others are compared with
    c.steps = 40
    c.tokens_per_step = 640  # that the policy may generate in a step, however they are spent
    c.seeds = 50  # runs of each arm in each world
    c.sweep_seeds = 16  # for each learning rate, none of the others
    c.learning_rates = (0.5, 1.0, 2.0, 4.0, 8.0)
    c.widenings = 3  # rates that may be added while the best is at the end of the grid
    c.sweep_from = ""  # results.json of an experiment whose learning rates are taken; "": a sweep
    c.chunk = 32  # runs that are computed at a time; memory grows with it
    # "ARM - ARM >= x" or "ARM / ARM >= x" of areas under the curve, "in WORLD" or in every world
    c.claims = ()

    c.regime = ml_collections.ConfigDict()  # worlds are added for every combination
    c.regime.horizons = ()  # turns of a chain; a fifth of them, at least four, are forks
    c.regime.start_success = ()
    c.regime.delays = ()  # turns after which a loss is seen
    c.regime.baselines = ("grpo", "vineppo")
    c.regime.random = "focus_random"

    c.league = ml_collections.ConfigDict()
    c.league.worlds = ()
    c.league.estimators = ()  # (): all
    # whose rollouts, branches and critic all estimators read; most compare rollouts of one task
    c.league.arm = "focus group_size=4"
    c.league.seeds = 30  # worlds drawn
    c.league.batches = 8  # in each
    c.league.tokens = 1280  # generated for a batch
    c.league.chunk = 10  # worlds at a time

    if experiment == "smoke":
        c.worlds = ("small: fork_chain length=12 forks=3 tasks=12 rows=20 p0=0.6",)
        c.arms = ("grpo", "ppo", "focus")
        c.steps, c.tokens_per_step = 10, 240
        c.seeds, c.sweep_seeds, c.chunk = 10, 4, 12
        c.learning_rates, c.widenings = (2.0, 4.0, 8.0), 1
        c.league.worlds = c.worlds
        c.league.estimators = ("grpo", "ppo", "vineppo", "focus")
        c.league.seeds = c.league.chunk = 4
        c.league.batches, c.league.tokens = 2, 480
    elif experiment == "claims":
        c.worlds = WORLDS
        c.arms = ("grpo", "ppo", "ppo_trust", "focus_random", "focus_random_alive", "focus")
        c.seeds = 100
        # ppo_trust has the lambda and the warm start of focus: what is left to branches.
        c.claims = (
            "focus / grpo >= 3 in long",
            "focus / ppo >= 1.3 in long",
            "focus / ppo_trust >= 1.3 in long",
            "focus - focus_random >= 0.1 in long",
            "focus - focus_random_alive >= 0.05 in long",
            "focus - ppo_trust >= -0.01",
        )
    elif experiment == "league":
        c.arms = c.worlds = ()
        c.league.worlds = LEAGUE_WORLDS
    elif experiment == "regime":
        c.worlds = ()
        c.arms = ("grpo", "vineppo", "focus_random", "focus")
        c.regime.horizons = (10, 20, 40)
        c.regime.start_success = (0.03, 0.1, 0.3)
        c.regime.delays = (1, 4)
        c.seeds, c.sweep_seeds = 30, 8
    return c
