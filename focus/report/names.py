"""What a run is called: what it ran, as its config is and not as it began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# What a method's config says: (estimator, rule of branching, context manager). Where a run's
# config says the same, the method's name is all there is to say.
USUAL = {
    "focus": ("focus", "expected_error_reduction", "full"),
    "focus_summarize": ("focus", "expected_error_reduction", "summarize"),
    "grpo": ("grpo", "none", "full"),
    "vineppo": ("vineppo", "uniform", "full"),
    "ppo": ("ppo", "none", "full"),
    "self_credit": ("self_credit", "none", "cite_summary"),
}


def run_name(config: Mapping[str, Any]) -> str | None:
    """A run's name: "gigpo" for a GRPO config with that estimator, "focus, random branches".

    A method where estimator, rule and context manager are that method's; else the estimator, with
    what is not as usual for it. A `method` of the user's own stands before that: "mine: gigpo".

    Args:
      config: nested, as in `config.json`; a run may be read whose config lacks parts, and then
        its method is its name.

    Returns:
      The name; None if the config says nothing of a method.
    """
    method = config.get("method")
    ran = estimator, rule, manager = (
        _get(config, "credit", "estimator"),
        _get(config, "branching", "rule"),
        _get(config, "context", "manager"),
    )
    if None in ran:
        return None if method is None else str(method)
    name = next((known for known, sets in USUAL.items() if sets == ran), None)
    if name is None:
        _, usual_rule, usual_manager = USUAL.get(estimator, ("", "none", "full"))
        parts = [str(estimator)]
        if rule != usual_rule:
            words = "no" if rule == "none" else str(rule).replace("_", " ")
            parts.append(f"{words} branches")
        if manager != usual_manager:
            parts.append("full context" if manager == "full" else str(manager).replace("_", " "))
        name = ", ".join(parts)
    return name if method is None or method in USUAL or method == name else f"{method}: {name}"


def _get(config: Mapping[str, Any], section: str, key: str) -> Any:
    part = config.get(section)
    return part.get(key) if isinstance(part, Mapping) else None
