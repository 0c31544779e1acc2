"""Arms and runs whose results are known, for tests of the laboratory's instruments."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class FakeArm:
    """An arm that learns best with learning rate `best`, and then this fast."""

    name: str
    best: float = 1.0
    speed: float = 0.1
    rule: str = "none"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeHistory:
    success: jax.Array
    tokens: jax.Array
    dose: jax.Array
    branch_tokens: jax.Array
    error_reduction: jax.Array
    expected_reduction: jax.Array
    residual_variance: jax.Array


ARMS = {
    "slow": FakeArm("slow", best=1.0, speed=0.05),
    "fast": FakeArm("fast", best=3.0, speed=0.2),
    "edge": FakeArm("edge", best=1000.0),
}


def easy_world(*, length=4, bonus=0.0, seed=0):
    """A world only in name."""
    return length, bonus, seed


WORLDS = {"easy": easy_world}


def make_run(world, options, arm, *, steps, tokens_per_step):
    """Success rises with the steps and, logarithmically, with nearness to the best rate."""
    assert world == "easy"

    def run(seed, learning_rate):
        noise = 0.05 * jax.random.normal(jax.random.key(seed))
        fit = jnp.exp(-jnp.square(jnp.log(learning_rate / arm.best)) / 4)
        step = jnp.arange(steps + 1)
        success = options.get("bonus", 0.0) + 0.2 + arm.speed * fit * step / steps + noise
        return FakeHistory(
            success=success,
            tokens=jnp.full(steps, tokens_per_step),
            dose=jnp.full(steps, tokens_per_step * arm.speed),
            branch_tokens=jnp.full(steps, 5 if arm.rule != "none" else 0),
            error_reduction=jnp.full(steps, 0.01),
            expected_reduction=jnp.full(steps, 0.02),
            residual_variance=jnp.ones(steps),
        )

    return run
