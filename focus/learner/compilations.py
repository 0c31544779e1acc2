"""How many programs this process has compiled; after warm-up the number stands still."""

from __future__ import annotations

from typing import Any

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Counter:
    """Hears of every program that XLA compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **unused: Any) -> None:
        del duration, unused
        self.count += event == _EVENT


_COUNTER = _Counter()


def compilations() -> int:
    """Programs compiled since this module was imported."""
    return _COUNTER.count
