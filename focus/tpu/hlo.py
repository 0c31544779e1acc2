"""Reads the text of a compiled XLA program: its loops, collectives and memory traffic.

XLA's own cost analysis counts the body of a loop once, however often it runs. A model that scans
over its layers does all of its work in loops, so here every instruction counts as often as it is
executed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

_BITS = {"pred": 8, "token": 0, "tuple": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")

COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# They move no data, or their cost is that of the instruction that they belong to.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
    "partition-id",
    "replica-id",
    "after-all",
    "iota",
    "broadcast",
    "async-update",
    "async-done",
    "opt-barrier",
    "optimization-barrier",
}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      opcode: such as "fusion".
      shape: text of the result's shape.
      operands: text between the parentheses.
      attributes: text behind them.
      is_root: whether its result is the computation's.
    """

    name: str
    opcode: str
    shape: str
    operands: str
    attributes: str
    is_root: bool

    def operand_names(self) -> list[str]:
        """Names of the operands, in order."""
        return _NAME.findall(self.operands)

    def called(self, key: str) -> list[str]:
        """Computations under an attribute such as "body" or "calls"."""
        match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return [] if match is None else re.findall(r"[\w.\-]+", match.group(1))


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: computations by name, and the one it starts with."""

    computations: dict[str, list[Instruction]]
    entry: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective, as often as it is executed.

    Attributes:
      kind: one of `COLLECTIVES`.
      count: executions per run of the program.
      num_bytes: of one execution, in one chip: the larger of what goes in and what comes out.
      group: partitions of the first group that take part together.
      where: last part of the operation's name in the traced program.
    """

    kind: str
    count: int
    num_bytes: int
    group: tuple[int, ...]
    where: str


def shape_bytes(text: str, *, hbm_only: bool = False) -> int:
    """Bytes of an array or of all arrays of a tuple.

    Args:
      text: a shape, "bf16[4,128]{1,0:T(8,128)S(1)}" or a tuple of them.
      hbm_only: leave out what lies in another memory space than the main one.
    """
    total = 0
    for dtype, sizes, layout in _SHAPE.findall(text):
        if hbm_only and re.search(r"S\([1-9]\d*\)", layout):
            continue
        bits = _BITS.get(dtype)
        if bits is None:
            digits = re.match(r"[a-z]+(\d+)", dtype)
            bits = int(digits.group(1)) if digits else 0
        count = math.prod(int(n.lstrip("<=")) for n in sizes.split(",") if n)
        total += -(-count * bits // 8)
    return total


def parse(text: str) -> Module:
    """The program in an HLO text.

    Args:
      text: as printed by XLA, after optimisation.

    Returns:
      Its computations.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header.group(2), [])
            if header.group(1):
                entry = header.group(2)
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found, line[found.end() :]))
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return Module(computations, entry)


def _instruction(found: re.Match, rest: str) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    begin = rest.index("(")
    close = _closing(rest, begin)
    return Instruction(
        name=found.group(2),
        opcode=rest[:begin],
        shape=shape,
        operands=rest[begin + 1 : close],
        attributes=rest[close + 1 :],
        is_root=bool(found.group(1)),
    )


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"unbalanced parentheses in {text[start : start + 80]!r}")


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often the body of a `while` runs; None where the program does not say.

    XLA notes the number beside the loop, or the condition compares a counter that starts at 0
    and goes up by 1, as that of `lax.scan` does, with a constant.
    """
    known = re.search(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)', loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[loop.called("condition")[0]]
    by_name = {i.name: i for i in condition}
    root = next(i for i in condition if i.is_root)
    if root.opcode == "fusion":
        inner = module.computations[root.called("calls")[0]]
        parameters = [i for i in inner if i.opcode == "parameter"]
        given = dict(
            zip(
                (p.name for p in sorted(parameters, key=lambda p: int(p.operands))),
                root.operand_names(),
            )
        )
        by_name |= {i.name: i for i in inner}
        by_name |= {inside: by_name[outside] for inside, outside in given.items()}
        root = next(i for i in inner if i.is_root)
    direction = re.search(r"direction=(L[TE])", root.attributes)
    if root.opcode != "compare" or direction is None:
        return None
    limit = by_name.get(root.operand_names()[1])
    if limit is None or limit.opcode != "constant" or not limit.operands.isdigit():
        return None
    return int(limit.operands) + (direction.group(1) == "LE")


@dataclasses.dataclass
class _Walk:
    """Instructions of a program with how often each is executed."""

    module: Module
    unknown_loops: list[str] = dataclasses.field(default_factory=list)

    def __call__(self, name: str | None = None, times: int = 1) -> Iterator[tuple]:
        name = self.module.entry if name is None else name
        for instruction in self.module.computations[name]:
            yield name, instruction, times
            inner = times
            if instruction.opcode == "while":
                trips = trip_count(self.module, instruction)
                if trips is None:
                    self.unknown_loops.append(instruction.name)
                inner = times * (1 if trips is None else trips)
            if instruction.opcode in ("while", "call", "conditional", "async-start"):
                keys = {"while": ("body",), "call": ("to_apply",), "async-start": ("calls",)}
                keys = keys.get(
                    instruction.opcode,
                    ("branch_computations", "true_computation", "false_computation"),
                )
                for called in (c for key in keys for c in instruction.called(key)):
                    yield from self(called, inner)


def unknown_loops(module: Module) -> tuple[str, ...]:
    """Names of the loops whose trip count the program does not say; they count once."""
    walk = _Walk(module)
    collections.deque(walk(), maxlen=0)
    return tuple(walk.unknown_loops)


def collectives(module: Module) -> list[Collective]:
    """Every collective of a program, in the order of execution.

    A reduce-scatter that the TPU compiler has lowered to a fusion of an all-reduce and a slice
    counts as what it is. One that advances step by step inside other fusions, perhaps in a loop,
    counts where it starts.
    """
    found = []
    for _, instruction, times in _Walk(module)():
        for kind, inner in _collective_of(module, instruction):
            size = shape_bytes(inner.shape)
            if inner.opcode.endswith("-start") and inner.shape.startswith("("):
                # An asynchronous one returns operands and results.
                size = max(shape_bytes(part) for part in _parts(inner.shape))
            group = _group(inner.attributes)
            if kind == "reduce-scatter" and inner.opcode.startswith("reduce-scatter"):
                size *= len(group)
            found.append(Collective(kind, times, size, group, _where(inner)))
    return found


def _collective_of(module: Module, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        if not _is_under_way(instruction):
            yield opcode, instruction
    elif opcode == "fusion":
        for name in instruction.called("calls"):
            scatter = "all-reduce-scatter" in name
            for inner in module.computations[name]:
                for kind, leaf in _collective_of(module, inner):
                    yield ("reduce-scatter" if scatter and kind == "all-reduce" else kind), leaf


def _is_under_way(collective: Instruction) -> bool:
    """Whether this is a later step of an asynchronous collective that has started before."""
    flag = re.search(
        r'"async_collective_fusion_config":\{[^}]*"flag_start":"(-?\d+)"', collective.attributes
    )
    return flag is not None and flag.group(1) != "-1"


def _advances_collective(module: Module, fusion: Instruction) -> bool:
    """Whether a fusion takes a collective that is under way one step further, or ends it."""
    return any(
        _is_under_way(inner) or (inner.opcode == "fusion" and _advances_collective(module, inner))
        for name in fusion.called("calls")
        for inner in module.computations[name]
    )


def _parts(shape: str) -> list[str]:
    """Elements of a tuple's shape; inner tuples stay whole."""
    parts, depth, start = [], 0, 1
    for i, c in enumerate(shape):
        depth += (c in "({[") - (c in ")}]")
        if (c == "," and depth == 1) or (c == ")" and depth == 0):
            parts.append(shape[start:i])
            start = i + 1
    return parts


def _where(instruction: Instruction) -> str:
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    return match.group(1) if match else ""


def _group(attributes: str) -> tuple[int, ...]:
    """First group of partitions, from any of the forms in which XLA prints them."""
    explicit = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if explicit:
        return tuple(int(n) for n in explicit.group(1).split(","))
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pairs:
        return tuple(int(n) for n in pairs.groups())
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, sizes = ([int(n) for n in iota.group(i).split(",")] for i in (1, 2))
        order = [int(n) for n in iota.group(3).split(",")] if iota.group(3) else range(len(sizes))
        ids = [_flat(i, sizes, list(order)) for i in range(math.prod(sizes))]
        return tuple(ids[: shape[-1]])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if named:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named.group(1)))
        axes, chosen = list(sizes), re.findall(r"'([^']+)'", named.group(2))
        strides, stride = {}, 1
        for axis in reversed(axes):
            strides[axis] = stride
            stride *= int(sizes[axis])
        ids = [0]
        for axis in chosen:
            ids = [i + strides[axis] * k for i in ids for k in range(int(sizes[axis]))]
        return tuple(ids)
    return (0,)


def _flat(index: int, sizes: list[int], order: list[int]) -> int:
    """Element `index` of `arange(prod(sizes)).reshape(sizes).transpose(order).ravel()`."""
    place = {}
    for axis in reversed(order):
        index, place[axis] = divmod(index, sizes[axis])
    flat = 0
    for axis, size in enumerate(sizes):
        flat = flat * size + place[axis]
    return flat


def hbm_bytes(module: Module) -> int:
    """Bytes that one run of a program moves between a chip and its main memory.

    Every instruction outside of fusions reads its operands and writes its result. What a fusion
    only slices counts with the slice, what it updates in place with the update. Arrays that the
    compiler has placed in on-chip memory count nothing.
    """
    total = 0
    for name, instruction, times in _Walk(module)():
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            continue
        shapes = {i.name: i.shape for i in module.computations[name]}
        total += times * _traffic(module, instruction, shapes)
    return total


def _traffic(module: Module, instruction: Instruction, shapes: dict[str, str]) -> int:
    operands = [shape_bytes(shapes.get(o, ""), hbm_only=True) for o in instruction.operand_names()]
    result = shape_bytes(instruction.shape, hbm_only=True)
    if instruction.opcode.endswith("-start"):
        # Results of the pair are written once; an async-start's shape repeats its operands.
        return max(result, sum(operands)) if instruction.opcode != "async-start" else 0
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * result
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * sum(operands[1:])
    if instruction.opcode == "fusion":
        return _fusion_traffic(module, instruction, operands, result)
    return result + sum(operands)


def _fusion_traffic(
    module: Module, instruction: Instruction, operands: list[int], result: int
) -> int:
    if _advances_collective(module, instruction):
        # The arrays that the collective reads and fills pass through; they counted at its start.
        shape = instruction.shape
        parts = [
            shape_bytes(part, hbm_only=True)
            for part in (_parts(shape) if shape.startswith("(") else [shape])
        ]
        for output, operand in re.findall(
            r"\{(\d*)\}: \((\d+), \{[\d, ]*\}", instruction.attributes
        ):
            operands[int(operand)] = parts[int(output or 0)] = 0
        result = sum(parts)
    total = sum(
        _read(module, instruction, position, size) for position, size in enumerate(operands) if size
    )
    updates = list(_updates(module, instruction)) if result else []
    if updates:
        kept = sum(shape_bytes(update.shape) for update, _ in updates)
        written = sum(shape_bytes(by_name[u.operand_names()[1]].shape) for u, by_name in updates)
        return total + max(result - kept, 0) + written
    return total + result


def _read(module: Module, fusion: Instruction, position: int, size: int) -> int:
    """Bytes that a fusion reads of one operand of `size` bytes; fusions hold fusions."""
    body = module.computations[fusion.called("calls")[0]]
    by_name = {i.name: i for i in body}
    parameter = next(
        (i.name for i in body if i.opcode == "parameter" and int(i.operands) == position), None
    )
    sizes = [0]
    for user in _users(body, parameter):
        names = [_source(by_name, name) for name in user.operand_names()]
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            sizes.append(shape_bytes(user.shape))
        elif user.opcode == "dynamic-update-slice" and names[0] == parameter:
            sizes.append(0)  # updated in place: only the update is written
        elif user.opcode == "fusion":
            sizes += [_read(module, user, i, size) for i, n in enumerate(names) if n == parameter]
        else:
            sizes.append(size)
    return min(size, max(sizes))


def _updates(
    module: Module, fusion: Instruction
) -> Iterator[tuple[Instruction, dict[str, Instruction]]]:
    """Updates in place inside a fusion, each with the instructions around it."""
    body = module.computations[fusion.called("calls")[0]]
    by_name = {i.name: i for i in body}
    for instruction in body:
        if instruction.opcode == "dynamic-update-slice":
            yield instruction, by_name
        elif instruction.opcode == "fusion":
            yield from _updates(module, instruction)


def _is_view(instruction: Instruction) -> bool:
    """Whether an instruction inside a fusion is its first operand, seen in another way."""
    if instruction.opcode == "fusion":
        return "output_to_operand_aliasing" in instruction.attributes
    return instruction.opcode in ("bitcast", "copy")


def _users(body: list[Instruction], name: str | None) -> list[Instruction]:
    """Instructions that read a value, seen through views of it."""
    users = []
    for instruction in body:
        if name in instruction.operand_names():
            if _is_view(instruction):
                users += _users(body, instruction.name)
            else:
                users.append(instruction)
    return users


def _source(by_name: dict[str, Instruction], name: str) -> str:
    """The value that a chain of views starts from."""
    while name in by_name and _is_view(by_name[name]):
        name = by_name[name].operand_names()[0]
    return name
