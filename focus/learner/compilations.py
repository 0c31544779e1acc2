"""Programs that this process has compiled: how many there are, and where they are kept.

After warm-up the number stands still. A program that is found in the directory counts too: it has
to be traced, looked up and loaded, which training should not wait for either.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

# Compiling takes at least this long where it is worth a file.
_WORTH_KEEPING_S = 0.1
_THRESHOLD = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"

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


def keep(directory: Path) -> None:
    """Keeps compiled programs in a directory, for processes to come; call it before the first one.

    A directory that the user has named (JAX_COMPILATION_CACHE_DIR) stays; with
    JAX_ENABLE_COMPILATION_CACHE=0, or where nothing can be written, nothing is kept. Entries are
    named by the program, JAX's version and the machine, so that none of them goes stale; delete
    the directory to have its space back.
    """
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    if os.access(directory, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(directory))
        if _THRESHOLD not in os.environ:
            jax.config.update(_THRESHOLD.lower(), _WORTH_KEEPING_S)
