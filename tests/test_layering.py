"""Imports point down: who may import whom, read from the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "focus"

# Each layer may import itself and the layers listed; "top" is every other thing in focus/.
ALLOWED = {
    "types": set(),
    "credit": {"types"},
    "branching": {"types", "credit"},
    "critic": {"types", "credit", "branching"},
    "lab": {"types", "credit", "branching", "critic", "journal"},
    "policy": {"types"},
    "chat": set(),
    "formats": {"policy", "chat"},
    "journal": {"types"},
    "learner": {"types", "credit", "branching", "critic", "policy", "formats", "journal"},
    "tasks": {"types"},
    "context": {"types"},
    "engine": {"types", "policy", "chat", "formats"},
    "rollout": {"types", "credit", "branching", "tasks", "context", "chat", "engine"},
    "metrics": {"types", "journal"},
    "terminal": set(),
    "report": {"types", "tasks", "critic", "journal", "metrics"},
}
TOP = {"run", "train", "evaluate", "laboratory", "tpu", "benchmark", "library"}
# Commands stand above all, wherever their name has to be: `python -m focus.credit`.
COMMAND = "__main__.py"
# Layers that see arrays only: no input or output, no networks, no optimisers.
PURE = {"types", "credit", "branching"}
PURE_LIBRARIES = {"jax", "chex", "numpy", "__future__"} | {
    "dataclasses",
    "functools",
    "typing",
    "collections",
    "numbers",
    "math",
    "itertools",
    "re",
}
WITHOUT_JAX = {"tasks", "context", "chat", "journal", "terminal"}
# The planner's arrays, and the engine in this process, are where rollouts touch a device.
WITH_JAX = {"rollout/belief.py", "rollout/values.py"}


def modules():
    return sorted(ROOT.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_module_belongs_to_a_layer():
    unknown = {layer_of(p) for p in modules()} - set(ALLOWED) - TOP - {"__init__"}
    assert not unknown


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    layer = layer_of(path)
    if layer in TOP | {"__init__"} or path.name == COMMAND:
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("focus.")}
    assert used <= ALLOWED[layer] | {layer}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_use_only_the_libraries_of_their_kind(path):
    layer = layer_of(path)
    libraries = {name.split(".")[0] for name in imports(path)} - {"focus"}
    if layer in PURE and path.name != COMMAND:
        assert libraries <= PURE_LIBRARIES
    if layer in WITHOUT_JAX:
        assert not libraries & {"jax", "flax", "optax"}
    place = str(path.relative_to(ROOT))
    if layer == "rollout" or place.startswith("engine/servers/"):
        assert "jax" not in libraries or place in WITH_JAX
    if layer in ("policy", "chat", "formats", "engine", "rollout", "tasks", "context"):
        assert not libraries & {"optax", "orbax"}
    # Servers run in an environment of their own; we speak HTTP to them.
    assert "sglang" not in libraries


def test_the_ladder_has_no_cycle():
    seen: set[str] = set()
    left = dict(ALLOWED)
    while left:
        ready = {layer for layer, below in left.items() if below <= seen}
        assert ready, f"a cycle among {sorted(left)}"
        seen |= ready
        for layer in ready:
            del left[layer]


def test_users_find_checkpoints_under_the_name_that_they_know():
    from focus.formats import hf
    from focus.formats import hf as known

    assert known is hf
