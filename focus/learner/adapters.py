"""Adapters as a run trains them: a frozen base on the mesh, and what is made of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from focus.formats import peft
from focus.learner import hosts, sharding
from focus.learner.state import TrainState
from focus.policy import lora
from focus.policy import model as models


class Adapters:
    """Adapters of low rank (`focus.policy.lora`) in place of the policy's parameters.

    Args:
      config: shape of the base.
      setting: which of its projections get an adapter.
      params: of the base.
      checksum: of `params`, 32 bits.
      mesh: where the base lies, as parameters do that are trained.

    Attributes:
      frozen: the base on the mesh. It is no part of the state, whose arrays have moments, are
        donated and are checkpointed.
    """

    def __init__(
        self,
        config: models.Config,
        setting: lora.LoraConfig,
        params: Any,
        checksum: int,
        *,
        mesh: Mesh,
    ):
        self._config, self._setting, self._checksum = config, setting, checksum
        places = sharding.shardings_of(params, mesh)
        self.frozen = jax.device_put(params, places)
        self._merge = jax.jit(lora.merge, out_shardings=places)

    def init(self, key: jax.Array) -> tuple[Any, jax.Array]:
        """New adapters, and the `base_checksum` of their state. `key` is consumed."""
        adapters = lora.init_adapters(self._config, self._setting, key)
        return adapters, jnp.uint32(self._checksum)

    def merge(self, state: TrainState) -> Any:
        """Plain parameters on the mesh.

        Raises:
          ValueError: the state's adapters were trained on another base.
        """
        self._check_base(state)
        return self._merge(self.frozen, state.params)

    def attach(self, state: TrainState) -> Any:
        """The base on the mesh with the adapters beside it; nothing is copied.

        Raises:
          ValueError: the state's adapters were trained on another base.
        """
        self._check_base(state)
        return lora.attach(self.frozen, state.params)

    def save(self, path: Path, state: TrainState, base_model: str | None = None) -> None:
        """Writes the adapters in the layout of PEFT; all processes call it, one writes.

        Args:
          path: see `peft.save_adapter`.
          state: with the adapters.
          base_model: name or path of the base, as a note.
        """
        adapters = hosts.local(state.params)
        if hosts.is_first():
            peft.save_adapter(path, self._config, self._setting, adapters, base_model=base_model)

    def _check_base(self, state: TrainState) -> None:
        found = int(jax.device_get(state.base_checksum))
        if found != self._checksum:
            raise ValueError(
                f"these adapters were trained on parameters with checksum {found:08x}, and the "
                f"run now starts from {self._checksum:08x}; bring back the model.path or the warm "
                "start that it began with, or use another workdir"
            )
