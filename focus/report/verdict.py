"""The top of the page: a few questions about a run, each answered in one sentence with a number.

Everything is computed from what the run recorded; a question that it cannot answer says what is
missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from focus.report.earned import earned_changes, trained_with
from focus.report.intervals import Z_95
from focus.report.reasons import noise_variance
from focus.report.record import Run

# Fewest branched states, or turns, that an answer is given from.
MIN_STATES = 16
# Ratio of squared error to stated variance that passes for honest.
HONEST = (0.8, 1.25)
RESAMPLES = 400

ANSWERS = ("yes", "no", "unclear", "unknown")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One question.

    Attributes:
      question: in a few words.
      answer: one of `ANSWERS`; "unclear" where chance may have decided it, "unknown" where
        nothing was recorded.
      number: what decides it, "" if unknown.
      sentence: what the number is, and of what.
    """

    question: str
    answer: str
    number: str
    sentence: str


def verdicts(run: Run) -> list[Verdict]:
    """What a reader wants to know first."""
    return [learned(run), critic(run), variances(run), branches(run), credit(run)]


def learned(run: Run) -> Verdict:
    """Held-out success of the last evaluation against that before training, or the first."""
    question = "Did it learn?"
    points = [
        (row["step"] + 1, row["heldout/success"], row.get("heldout/std_error"))
        for row in run.metrics
        if row.get("heldout/success") is not None
    ]
    before = run.summary.get("success_before")
    if before is None and run.evaluations and run.evaluations[0]["step"] == 0:
        outcomes = [t["outcome"] for t in run.evaluations[0]["tasks"] if t["outcome"] is not None]
        before = float(np.mean([y >= 1 for y in outcomes])) if outcomes else None
    since = "training"
    if before is None and len(points) > 1:
        since, before = f"step {points[0][0]}", points[0][1]
    if before is None or not points:
        return Verdict(question, "unknown", "", "It takes two evaluations to tell.")
    step, after, _ = points[-1]
    # A share of 0 or 1 has a binomial error of 0; what other evaluations of the run had is safer.
    error = max((e for *_, e in points if e is not None), default=None)
    gain = after - before
    text = f"Held-out success after {step} steps is {100 * after:.1f} %, {100 * before:.1f} %"
    text += f" before {since}" if since == "training" else f" after {since}"
    if not error:
        return Verdict(question, "unclear", _points(gain), f"{text}; no standard error is known.")
    # Both evaluations play the same tasks; taking them for independent is the safe side.
    half = Z_95 * np.sqrt(2) * error
    return Verdict(
        question,
        _beyond(gain, half),
        _points(gain),
        f"{text}: a difference of {_points(gain)} ± {100 * half:.1f} points.",
    )


def critic(run: Run) -> Verdict:
    """Squared error of V on fresh branch means against that of a constant, their mean."""
    question = "Is the critic better than a constant?"
    rows = _fresh(run.branches)
    if len(rows) < MIN_STATES:
        return _critic_of_outcomes(run, question)
    value, mean, count, _ = _columns(rows)
    noise = mean * (1 - mean) / (count - 1)
    constant = np.average(mean, weights=count)
    error, of_constant = (mean - value) ** 2 - noise, (mean - constant) ** 2 - noise
    saved, low, high = _bootstrap(
        lambda index: np.mean(of_constant[index] - error[index]), [row["step"] for row in rows]
    )
    # What is left once the noise is taken out may fall below 0.
    explained = min(saved / max(float(np.mean(of_constant)), 1e-9), 1.0)
    return Verdict(
        question,
        "yes" if low > 0 else "no" if high < 0 else "unclear",
        f"R² {_two(explained)}" if explained >= -1 else "R² < −1",
        f"On {len(rows):,} fresh branch means of the second half of the run its squared error "
        f"is {_three(np.mean(error))}, that of their mean {_three(np.mean(of_constant))}, noise "
        f"taken out: {_three(saved)} saved (95 % interval {_three(low)} to {_three(high)}).",
    )


def _critic_of_outcomes(run: Run, question: str) -> Verdict:
    """The same from the outcomes of base rollouts, for runs that branch too little."""
    steps = [
        (row["step"], row["critic/outcome_error"], row["critic/constant_error"])
        for row in run.metrics[len(run.metrics) // 2 :]
        if None not in (row.get("critic/outcome_error"), row.get("critic/constant_error"))
    ]
    if len(steps) < 4:
        return Verdict(question, "unknown", "", _too_few(run))
    step, error, of_constant = np.array(steps, float).T
    saved, low, high = _bootstrap(lambda index: np.mean((of_constant - error)[index]), step)
    explained = saved / max(float(np.mean(of_constant)), 1e-9)
    return Verdict(
        question,
        "yes" if low > 0 else "no" if high < 0 else "unclear",
        f"R² {_two(explained)}" if explained >= -1 else "R² < −1",
        f"Over the last {len(steps):,} steps its squared error on outcomes it had not seen is "
        f"{_three(np.mean(error))}, that of each step's mean outcome "
        f"{_three(np.mean(of_constant))}: {_three(saved)} saved (95 % interval {_three(low)} to "
        f"{_three(high)}).",
    )


def variances(run: Run) -> Verdict:
    """Squared error of fresh branch means against the variance that they were stated to have."""
    question = "Are its variances honest?"
    rows = _fresh(run.branches, need_std=True)
    if len(rows) < MIN_STATES:
        return Verdict(question, "unknown", "", _too_few(run))
    value, mean, count, std = _columns(rows)
    error = (mean - value) ** 2
    stated = std**2 + np.array([noise_variance(row) for row in rows]) / count

    def ratio(index):
        return np.mean(error[index]) / np.mean(stated[index])

    times, low, high = _bootstrap(ratio, [row["step"] for row in rows])
    answer = "unclear"
    if HONEST[0] <= times <= HONEST[1]:
        answer = "yes"
    elif low > HONEST[1] or high < HONEST[0]:
        answer = "no"
    side = "more" if times > 1 else "less"
    side = "as much as" if answer == "yes" else f"{side} than"
    return Verdict(
        question,
        answer,
        f"{times:.2f} ×",
        f"Fresh branch means miss V by {times:.2f} times the variance that critic and noise "
        f"state (95 % interval {low:.2f} to {high:.2f}): it errs {side} it says.",
    )


def branches(run: Run) -> Verdict:
    """Error reduction that branches brought against what they were chosen for."""
    question = "Did branches pay?"
    rows = [row for row in _fresh(run.branches, need_std=True, least=1) if row.get("gain")]
    spent = _sum(run.metrics, "tokens/branch")
    generated = sum(_sum(run.metrics, f"tokens/{kind}") for kind in ("base", "branch", "summary"))
    if not run.branches:
        return Verdict(question, "unknown", "", "This run sampled no branches.")
    if len(rows) < MIN_STATES:
        return Verdict(
            question, "unknown", "", "The gains that branches were chosen for were not recorded."
        )
    value, mean, count, std = _columns(rows)
    gain = np.array([row["gain"] for row in rows])
    noise = np.array([noise_variance(row) for row in rows]) / count
    came = gain * (mean - value) ** 2 / (std**2 + noise)

    def ratio(index):
        return np.sum(came[index]) / np.sum(gain[index])

    times, low, high = _bootstrap(ratio, [row["step"] for row in rows])
    share = f" for {100 * spent / generated:.0f} % of the tokens" if generated else ""
    return Verdict(
        question,
        "yes" if low > HONEST[0] else "no" if high < HONEST[0] else "unclear",
        f"{times:.2f} ×",
        f"They corrected V by {times:.2f} times what they were chosen for (95 % interval "
        f"{low:.2f} to {high:.2f}){share}, in the second half of the run.",
    )


def credit(run: Run) -> Verdict:
    """Whether turns were pushed the way the refined values say they went."""
    question = "Does the policy hear it?"
    pairs = [
        (change, trained)
        for record in run.trees
        for trajectory in record["trajectories"]
        for change, segment in zip(earned_changes(trajectory), trajectory["segments"])
        if change is not None and (trained := trained_with(segment)) is not None
    ]
    if len(pairs) < MIN_STATES or not np.all(np.std(pairs, axis=0) > 0):
        return Verdict(question, "unknown", "", "No turns with a refined value were recorded.")
    earned, trained = np.array(pairs).T
    agree = float(np.corrcoef(earned, trained)[0, 1])
    # Fisher's interval.
    half = Z_95 / np.sqrt(len(pairs) - 3)
    low, high = np.tanh(np.arctanh(agree) - half), np.tanh(np.arctanh(agree) + half)
    return Verdict(
        question,
        "yes" if low > 0.3 else "no" if high < 0.3 else "unclear",
        f"r {_two(agree)}",
        f"Over {len(pairs):,} turns of the recorded trees the advantage trained with goes with "
        f"the change of V* at a correlation of {_two(agree)} (95 % interval {_two(low)} to "
        f"{_two(high)}).",
    )


def _fresh(
    rows: Sequence[Mapping[str, Any]], *, need_std: bool = False, least: int = 2
) -> list[Mapping[str, Any]]:
    """Branched states of the second half of the run with `least` outcomes and a known value."""
    if not rows:
        return []
    first, last = rows[0]["step"], rows[-1]["step"]
    half = first + (last - first + 1) // 2
    needed = ("value", "mean", "std") if need_std else ("value", "mean")
    return [
        row
        for row in rows
        if row["step"] >= half
        and (row.get("count") or 0) >= least
        and all(row.get(name) is not None for name in needed)
    ]


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, ...]:
    names = ("value", "mean", "count", "std")
    return tuple(np.array([row.get(name) or 0.0 for row in rows], float) for name in names)


def _bootstrap(statistic, steps: Sequence[int] | np.ndarray) -> tuple[float, float, float]:
    """A statistic of rows and its 95 % interval, whole steps resampled: their errors are shared."""
    steps = np.asarray(steps)
    groups = [np.flatnonzero(steps == step) for step in np.unique(steps)]
    if len(groups) < 4:
        groups = [np.array([i]) for i in range(len(steps))]
    rng = np.random.default_rng(0)
    draws = [
        statistic(np.concatenate([groups[g] for g in rng.integers(len(groups), size=len(groups))]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(statistic(np.arange(len(steps)))), float(low), float(high)


def _too_few(run: Run) -> str:
    if not run.branches:
        return "Without branches there are no fresh outcomes to hold it against."
    return f"It takes {MIN_STATES} branched states with two outcomes each."


def _beyond(difference: float, half: float) -> str:
    if abs(difference) <= half:
        return "unclear"
    return "yes" if difference > 0 else "no"


def _sum(metrics: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(row.get(key) or 0 for row in metrics))


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _three(number: float) -> str:
    return f"{number:.3f}".replace("-", "−")


def _two(number: float) -> str:
    return f"{number:.2f}".replace("-", "−")
