"""How good is an estimator's credit? Held against exact advantages, and as a policy gradient.

All estimators read the same rollouts of one policy. For each the league says how its credit
goes with the true advantage (correlation, sign), what of it is systematic and what is chance
(bias and variance given state and action), and what gradient it makes: its direction, and the
signal along the true gradient against the noise, per token that was generated.

Batches of one world are independent draws, and every figure that is a square of an expectation
is estimated from products of different batches: few batches make it noisy, not biased.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from focus.credit.channels import missing_channels
from focus.credit.registry import ESTIMATORS, estimate
from focus.journal import write_atomically
from focus.lab import exact
from focus.lab.collect import Collected, make_collect
from focus.lab.jobs import Note
from focus.lab.specs import WorldSpec, slug
from focus.lab.statistics import interval
from focus.lab.sweep import QUICK_COMPILE, SEED_STRIDE
from focus.lab.worlds import WORLDS
from focus.types import Array

# Channels whose readers know what a branch's row is: it has values of its own, or its place in a
# tree or beside its parent.
KNOWS_BRANCHES = {"value", "token_value", "parent", "parent_traj"}
# Channels that hold what branches found.
READS_BRANCHES = {"mc_return", "cut_value"}
# True advantages below this are nobody's merit: their sign is not asked for.
MIN_ADVANTAGE = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sample:
    """What one estimator says of one batch, and what is true. Letters: B rows, S segments.

    Attributes:
      estimate: [B, S] mean advantage of the segment's tokens.
      truth: [B, S] exact advantage of its action in its state.
      weight: [B, S] tokens of the segment that enter the loss, 0 where there are none.
      state_action: [B, S] int32 in [0, M), which state and action of the world it is.
      policy_row: [B, S] int32 in [0, R).
      action: [B, S] int32 in [0, A).
      tokens: scalar, tokens that were generated for the batch.
    """

    estimate: Array
    truth: Array
    weight: Array
    state_action: Array
    policy_row: Array
    action: Array
    tokens: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the batches of one world, for one estimator.

    Attributes:
      batches: number of them.
      tokens: that were generated.
      moments: [6] over segments: count, e, t, e^2, t^2, e t; e is the estimate, t the truth.
      signs: [2] number of segments with a true sign, and of those that the estimate has too.
      cells: [4, M] over batches, for each state and action: visits n, n^2, sum s of (e - t), s^2.
      error: [M] sum of (e - t)^2.
      gradient: [R, A] sum of the batches' gradients.
      squared_norm: sum of their squared norms.
      along: [2] sum of their projections on the true gradient's direction, and of the squares.
    """

    batches: Array
    tokens: Array
    moments: Array
    signs: Array
    cells: Array
    error: Array
    gradient: Array
    squared_norm: Array
    along: Array


def no_sums(num_state_actions: int, policy: Array) -> Sums:
    """Before the first batch."""
    zero = jnp.zeros(())
    return Sums(
        batches=zero,
        tokens=zero,
        moments=jnp.zeros(6),
        signs=jnp.zeros(2),
        cells=jnp.zeros((4, num_state_actions)),
        error=jnp.zeros(num_state_actions),
        gradient=jnp.zeros_like(policy),
        squared_norm=zero,
        along=jnp.zeros(2),
    )


def add_batch(sums: Sums, sample: Sample, policy: Array, true_gradient: Array) -> Sums:
    """Adds one batch of a world.

    The batch's gradient is that of its loss, up to a factor that is the same for all:
    `g = sum over segments of weight * estimate * grad log pi(action | row)`.

    Args:
      sums: so far.
      sample: the batch.
      policy: [R, A] probabilities.
      true_gradient: [R, A] of success with respect to the logits.
    """
    played = sample.weight > 0
    e = jnp.where(played, sample.estimate, 0.0)
    t = jnp.where(played, sample.truth, 0.0)
    count = played.astype(e.dtype)
    moments = jnp.stack([jnp.sum(x) for x in (count, e, t, e * e, t * t, e * t)])
    decided = played & (jnp.abs(t) > MIN_ADVANTAGE)
    agrees = jnp.where(e == 0, 0.5, jnp.sign(e) == jnp.sign(t))
    signs = jnp.stack([jnp.sum(decided), jnp.sum(jnp.where(decided, agrees, 0.0))])

    visits = jnp.zeros_like(sums.error).at[sample.state_action].add(count)
    excess = jnp.zeros_like(sums.error).at[sample.state_action].add(e - t)
    error = jnp.zeros_like(sums.error).at[sample.state_action].add(jnp.square(e - t))

    score = jax.nn.one_hot(sample.action, policy.shape[-1]) - policy[sample.policy_row]
    push = jnp.where(played, sample.weight, 0.0) * e
    gradient = jnp.zeros_like(policy).at[sample.policy_row].add(push[..., None] * score)
    direction = true_gradient / jnp.maximum(jnp.linalg.norm(true_gradient), 1e-30)
    along = jnp.sum(gradient * direction)
    return Sums(
        batches=sums.batches + 1,
        tokens=sums.tokens + sample.tokens,
        moments=sums.moments + moments,
        signs=sums.signs + signs,
        cells=sums.cells + jnp.stack([visits, visits**2, excess, excess**2]),
        error=sums.error + error,
        gradient=sums.gradient + gradient,
        squared_norm=sums.squared_norm + jnp.sum(jnp.square(gradient)),
        along=sums.along + jnp.stack([along, along**2]),
    )


def read_sums(sums: Sums) -> dict[str, Array]:
    """What the batches of one world say, as scalars; averages over worlds are made of these.

    Returns:
      correlation: of estimates and truth over all segments; 0 where either does not vary.
      sign_agreement: share of segments; an estimate of 0 counts half.
      squared_bias: mean over segments of (E[e | state, action] - t)^2.
      squared_error: mean over the same segments of (e - t)^2.
      along: mean projection of a batch's gradient on the direction of the true one.
      squared_along: square of that expectation.
      squared_gradient: squared norm of the expected gradient.
      noise: expected squared distance of a batch's gradient from its expectation.
      tokens: of a batch.
    """
    n, e, t, ee, tt, et = sums.moments
    spread = (n * ee - e * e) * (n * tt - t * t)
    # A spread that is rounding alone is none.
    varies = spread > 1e-10 * (n * ee) * (n * tt)
    correlation = jnp.where(
        varies, (n * et - e * t) / jnp.sqrt(jnp.where(varies, spread, 1.0)), 0.0
    )
    visits, visits_sq, excess, excess_sq = sums.cells
    # Pairs of visits in different batches: their errors are independent given state and action.
    pairs = visits**2 - visits_sq
    known = pairs > 0.5
    bias = jnp.where(known, (excess**2 - excess_sq) / jnp.where(known, pairs, 1.0), 0.0)
    weight = jnp.where(known, visits, 0.0)
    total = jnp.maximum(jnp.sum(weight), 1.0)
    b = sums.batches
    between = b * (b - 1)
    squared_gradient = (jnp.sum(sums.gradient**2) - sums.squared_norm) / between
    return {
        "correlation": correlation,
        "sign_agreement": sums.signs[1] / jnp.maximum(sums.signs[0], 1.0),
        "squared_bias": jnp.sum(weight * bias) / total,
        "squared_error": jnp.sum(jnp.where(known, sums.error, 0.0)) / total,
        "along": sums.along[0] / b,
        "squared_along": (sums.along[0] ** 2 - sums.along[1]) / between,
        "squared_gradient": squared_gradient,
        "noise": sums.squared_norm / b - squared_gradient,
        "tokens": sums.tokens / b,
    }


# --- figures of one estimator --------------------------------------------------------------------


def _mean(x: np.ndarray) -> np.ndarray:
    return np.mean(x, axis=(-2, -1))


def _bias(squared_bias: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(_mean(squared_bias), 0.0))


def _variance(squared_error: np.ndarray, squared_bias: np.ndarray) -> np.ndarray:
    return _mean(squared_error) - _mean(squared_bias)


def _cosine(along: np.ndarray, squared_gradient: np.ndarray) -> np.ndarray:
    norm = np.sqrt(np.maximum(_mean(squared_gradient), 0.0))
    return np.clip(_quotient(_mean(along), norm), -1.0, 1.0)


def _signal_to_noise(
    along: np.ndarray, squared_along: np.ndarray, noise: np.ndarray, tokens: np.ndarray
) -> np.ndarray:
    """Per 1,000 tokens; negative where the expected gradient points away from the true one."""
    signal = np.sign(_mean(along)) * np.maximum(_mean(squared_along), 0.0)
    return 1000 * _quotient(signal, _mean(noise) * _mean(tokens))


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.divide(x, y, out=np.zeros_like(x), where=y > 0)


# Figure -> what of `read_sums` it is made of, and how.
FIGURES: dict[str, tuple[Callable[..., np.ndarray], tuple[str, ...]]] = {
    "correlation": (_mean, ("correlation",)),
    "sign_agreement": (_mean, ("sign_agreement",)),
    "bias": (_bias, ("squared_bias",)),
    "variance": (_variance, ("squared_error", "squared_bias")),
    "cosine": (_cosine, ("along", "squared_gradient")),
    "snr": (_signal_to_noise, ("along", "squared_along", "noise", "tokens")),
}


def figures(scalars: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Every figure with its 95 % interval over seeds, `name, name_low, name_high`.

    Args:
      scalars: of `read_sums`, [seeds] each.
    """
    found = {}
    for name, (statistic, parts) in FIGURES.items():
        said = interval(statistic, *(scalars[part] for part in parts))
        found |= {name: said.value, f"{name}_low": said.low, f"{name}_high": said.high}
    return found


# --- a world's league ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LeagueSettings:
    """How a league is held.

    Attributes:
      estimators: names in `ESTIMATORS`.
      arm: of `focus.lab.arms`, whose rollouts, branches and critic the estimators read.
      seeds: worlds that are drawn, each with its first policy.
      batches: of each world.
      chunk: worlds that are computed at a time; memory grows with it.
      tokens: that are generated for a batch.
      seed: shifts all seeds.
    """

    estimators: tuple[str, ...]
    arm: Any
    seeds: int
    batches: int
    chunk: int
    tokens: int
    seed: int

    def __post_init__(self):
        for name, low, why in (
            ("seeds", 2, "an interval needs two"),
            ("batches", 2, "bias and signal are told from noise by products of two batches"),
            ("chunk", 1, "it counts worlds"),
        ):
            if getattr(self, name) < low:
                raise ValueError(
                    f"league.{name} must be >= {low} ({why}), got {getattr(self, name)}"
                )


def find_estimators(names: Sequence[str]) -> tuple[str, ...]:
    """Names as given, or all estimators.

    Raises:
      ValueError: one that is unknown, or no estimator.
    """
    known = [name for name, spec in ESTIMATORS.items() if spec.kind == "estimator"]
    for name in names:
        if name not in known:
            raise ValueError(f"estimator {name!r} is unknown; choose one of {', '.join(known)}")
    return tuple(names) or tuple(known)


def league(world: WorldSpec, settings: LeagueSettings, note: Note) -> list[dict[str, Any]]:
    """Holds all estimators against the truth in one world.

    Args:
      world: which.
      settings: see `LeagueSettings`.
      note: takes the share that is done.

    Returns:
      A record for every estimator, best signal-to-noise first: `world`, `estimator`, and `figures`;
      those that the world cannot feed come last, with what they lack in `missing`.
    """
    s = settings
    begin, play = _programs(world, s)
    fed: dict[str, Any] = {}
    missing: dict[str, str] = {}
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    seeds = np.arange(s.seeds, dtype=np.uint32) + np.uint32(s.seed * SEED_STRIDE)
    done, total = 0, -(-s.seeds // s.chunk) * s.batches * len(s.estimators)
    for first in range(0, s.seeds, s.chunk):
        # Repeats of the first world fill the last chunk up, and are dropped.
        index = np.arange(first, first + s.chunk)
        real = index < s.seeds
        drawn, policy, gradient, nothing, keys = begin(jnp.asarray(seeds[index * real]))
        sums = dict.fromkeys(s.estimators, nothing)
        for batch in range(s.batches):
            rollouts = play(drawn, policy, keys[:, batch])
            for name in s.estimators:
                arguments = sums[name], rollouts, policy, gradient
                if name not in fed and name not in missing:
                    try:
                        fed[name] = _adder(name, arguments)
                    except ValueError as error:
                        lacks = missing_channels(rollouts.batch, ESTIMATORS[name].inputs)
                        missing[name] = ", ".join(sorted(lacks)) or str(error)
                if name in fed:
                    sums[name] = fed[name](*arguments)
                done += 1
                note(min(done / total, 0.999), f"{name}, batch {batch + 1} of {s.batches}")
        for name in fed:
            read = jax.vmap(read_sums)(sums[name])
            found.setdefault(name, []).append({k: np.asarray(v)[real] for k, v in read.items()})
    rows = [
        {
            "world": world.label,
            "estimator": name,
            "missing": "",
            **figures({key: np.concatenate([part[key] for part in parts]) for key in parts[0]}),
        }
        for name, parts in found.items()
    ]
    rows.sort(key=lambda row: -row["snr"])
    lacking = [{"world": world.label, "estimator": n, "missing": m} for n, m in missing.items()]
    return rows + lacking


def _programs(world: WorldSpec, settings: LeagueSettings) -> tuple[Any, Any]:
    """What draws worlds with all that stays the same in them, and what plays a batch in each."""
    options = dict(world.options)

    def begin(seed):
        drawn = WORLDS[world.name](**options, seed=seed)
        policy = jax.nn.softmax(drawn.logits)
        nothing = no_sums(drawn.next_state[..., 0].size, policy)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), settings.batches)
        return drawn, policy, exact.policy_gradient(drawn, policy), nothing, keys

    play = make_collect(world.name, options, settings.arm, tokens_per_step=settings.tokens)
    return tuple(jax.jit(jax.vmap(f), compiler_options=QUICK_COMPILE) for f in (begin, play))


def _adder(name: str, arguments: tuple[Any, ...]) -> Any:
    """The compiled program that adds a batch to an estimator's sums.

    Raises:
      ValueError: it lacks a channel; said while it is traced.
    """

    def add(sums, rollouts, policy, gradient):
        return add_batch(sums, judged(name, rollouts), policy, gradient)

    traced = jax.jit(jax.vmap(add)).trace(*arguments)
    return traced.lower().compile(compiler_options=QUICK_COMPILE)


def judged(name: str, found: Collected) -> Sample:
    """What an estimator says of rollouts.

    An estimator that compares whole rollouts gets no branches to compare, which are none; and it is
    charged for the tokens that it reads.

    Args:
      name: of the estimator.
      found: one world's.
    """
    spec = ESTIMATORS[name]
    inputs, rows = set(spec.inputs), found.batch.row_mask
    if not inputs & KNOWS_BRANCHES:
        rows = rows & (jnp.arange(rows.size) < found.num_base)
    # A branch's row holds what it played itself.
    hparams = {"fork_rows": "suffix"} if "fork_rows" in spec.hparams else {}
    credit = estimate(name, dataclasses.replace(found.batch, row_mask=rows), **hparams)
    episodes = found.episodes
    layers, states, actions = found.sizes
    layer = jnp.minimum(episodes.layer[:, :-1], layers - 1)
    paid = found.batch.row_mask if inputs & (KNOWS_BRANCHES | READS_BRANCHES) else rows
    return Sample(
        estimate=credit.advantages,
        truth=found.truth,
        weight=jnp.where(credit.mask & episodes.mask, episodes.tokens, 0).astype(jnp.float32),
        state_action=(layer * states + episodes.state[:, :-1]) * actions + episodes.action,
        policy_row=found.policy_row,
        action=episodes.action,
        tokens=jnp.sum(jnp.where(paid, episodes.cost, 0)).astype(jnp.float32),
    )


def overall(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every estimator over the worlds that feed it, best first.

    Figures are means over worlds; signal to noise, whose scale is each world's own, is the
    geometric mean of its share of the world's best.

    Args:
      rows: of `league`, of all worlds.
    """
    fed = [row for row in rows if not row["missing"]]
    best: dict[str, float] = {}
    for row in fed:
        best[row["world"]] = max(best.get(row["world"], 0.0), row["snr"])
    found = []
    for name in dict.fromkeys(row["estimator"] for row in fed):
        mine = [row for row in fed if row["estimator"] == name]
        shares = [max(r["snr"], 0.0) / best[r["world"]] if best[r["world"]] else 0.0 for r in mine]
        with np.errstate(divide="ignore"):
            snr = float(np.exp(np.mean(np.log(shares))))
        means = {key: float(np.mean([row[key] for row in mine])) for key in FIGURES if key != "snr"}
        found.append({"estimator": name, "worlds": len(mine), "missing": "", **means, "snr": snr})
    # Those that every world feeds come first: a mean over fewer worlds is another mean.
    return sorted(found, key=lambda row: (-row["worlds"], -row["snr"]))


@dataclasses.dataclass(frozen=True)
class LeagueJob:
    """The league of one world, as a job.

    Attributes:
      world: which.
      settings: see `LeagueSettings`.
      workdir: gets `league/<world>.json`.
    """

    world: WorldSpec
    settings: LeagueSettings
    workdir: Path

    @property
    def title(self) -> str:
        """What progress calls it."""
        return f"league in {self.world.label}"

    @property
    def path(self) -> Path:
        """Where its records are kept."""
        return self.workdir / "league" / f"{slug(self.world.label)}.json"

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.path.is_file()

    def _identity(self) -> dict[str, Any]:
        said = {"world": [self.world.name, dict(self.world.options)]}
        said |= {"settings": dataclasses.asdict(self.settings)}
        return json.loads(json.dumps(said, default=str))

    def claim(self) -> None:
        """Checks that what is kept under this label is of this world and league.

        Raises:
          ValueError: it is not.
        """
        if self.finished and json.loads(self.path.read_text())["identity"] != self._identity():
            raise ValueError(
                f"{self.path} is of another world or league: give this one another label, or "
                "delete that file"
            )

    def __call__(self, note: Note) -> None:
        """Holds the league, if it was not held before."""
        self.claim()
        if not self.finished:
            rows = league(self.world, self.settings, note)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"identity": self._identity(), "rows": rows}, allow_nan=False)
            write_atomically(self.path, text)

    def read(self) -> list[dict[str, Any]]:
        """Its records."""
        return json.loads(self.path.read_text())["rows"]
