"""What a run would do on a slice: memory, collectives, step time and MFU, as tables.

The prediction is a roofline. A program has three times: FLOPs executed over the chip's peak, bytes
of memory traffic over the memory's bandwidth, and its collectives over the links that their group
has. Arithmetic and memory traffic are taken to overlap, collectives with nothing:

    time = max(compute, memory) + collectives

The compiler does hide collectives behind arithmetic, so this errs on one side; matrix products do
not reach the peak, so it errs on the other, too: `peak_share_for_half` says what share of it they
have to reach for an MFU of 50 %. `best` has all three overlap. Latencies, the host and padding
inside of rows are left out.

An optimiser step is one micro-batch and one run of the optimiser: more micro-batches to a step
make the optimiser's share smaller. MFU is model FLOPs (see `focus.tpu.flops`) over what the chips
could do at their peak in that time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import rich.console
import rich.table
from jax.sharding import Mesh

from focus.tpu.chips import Slice
from focus.tpu.compile import Compiled
from focus.tpu.hlo import Collective


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds that a program takes on one chip, by what limits it."""

    compute_s: float
    memory_s: float
    collective_s: float

    @property
    def total_s(self) -> float:
        """Nothing hides behind a collective, see the module."""
        return max(self.compute_s, self.memory_s) + self.collective_s

    @property
    def best_s(self) -> float:
        """Everything overlaps."""
        return max(self.compute_s, self.memory_s, self.collective_s)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one run of a program, in one chip."""

    kind: str
    count: int
    num_bytes: int
    seconds: float


def collective_seconds(collective: Collective, slice_: Slice, mesh: Mesh) -> float:
    """Seconds of one execution.

    With n chips and B bytes of the larger of operand and result, at the bandwidth of their rings
    (`Slice.ring_bytes_per_s`): all-gather and reduce-scatter `B (n - 1) / n`, all-reduce twice
    that, all-to-all a quarter (each part goes a quarter of the ring on average), and a permute
    `B` over one link.
    """
    devices = mesh.devices.flat
    coords = [tuple(devices[i].coords) for i in collective.group]
    size = len(coords)
    if collective.kind == "collective-permute":
        return collective.num_bytes / slice_.chip.link_bytes_per_s
    share = {"all-reduce": 2.0, "all-to-all": 0.25}.get(collective.kind, 1.0)
    moved = share * collective.num_bytes * (size - 1) / size
    return moved / slice_.ring_bytes_per_s(coords)


def traffic(compiled: Compiled, slice_: Slice, mesh: Mesh) -> list[Traffic]:
    """The collectives of a program by kind, the slowest kind first."""
    totals = collections.defaultdict(lambda: [0, 0, 0.0])
    for c in compiled.collectives:
        total = totals[c.kind]
        total[0] += c.count
        total[1] += c.count * c.num_bytes
        total[2] += c.count * collective_seconds(c, slice_, mesh)
    kinds = [Traffic(kind, *total) for kind, total in totals.items()]
    return sorted(kinds, key=lambda t: -t.seconds)


def times(compiled: Compiled, slice_: Slice, mesh: Mesh) -> Times:
    """The roofline of a program, see the module."""
    chip = slice_.chip
    return Times(
        compute_s=compiled.program.hardware_flops / slice_.num_chips / chip.flops_per_s,
        memory_s=compiled.hbm_bytes / chip.hbm_bytes_per_s,
        collective_s=sum(t.seconds for t in traffic(compiled, slice_, mesh)),
    )


def _peak_share_for_half(parts: list[dict[str, Any]], half_s: float) -> float | None:
    """Share of the peak at which programs take `half_s`; None if collectives alone take that."""
    left = half_s - sum(p["time"]["collective_s"] for p in parts)
    bound = [p["time"] for p in parts if p["time"]["compute_s"] > p["time"]["memory_s"]]
    left -= sum(p["time"]["memory_s"] for p in parts if p["time"] not in bound)
    return sum(t["compute_s"] for t in bound) / left if left > 0 else None


def report(
    name: str,
    compiled: list[Compiled],
    slice_: Slice,
    mesh: Mesh,
    *,
    num_params: int,
    num_adapter_params: int | None = None,
) -> dict[str, Any]:
    """Everything there is to say, as JSON.

    Args:
      name: of the config.
      compiled: its programs; "gradient" and "optimizer" make an optimiser step.
      slice_: the chips.
      mesh: their mesh.
      num_params: of the model.
      num_adapter_params: of the adapters that are trained in its place, if any.
    """
    programs = {}
    for each in compiled:
        clock = times(each, slice_, mesh)
        programs[each.program.name] = {
            "tokens": each.program.tokens,
            "argument_bytes": each.argument_bytes,
            "output_bytes": each.output_bytes,
            "temporary_bytes": each.temporary_bytes,
            "resident_bytes": each.program.resident_bytes,
            "peak_bytes": each.peak_bytes,
            "model_flops": each.program.model_flops,
            "hardware_flops": each.program.hardware_flops,
            "hbm_bytes": each.hbm_bytes,
            "collectives": [dataclasses.asdict(t) for t in traffic(each, slice_, mesh)],
            "unknown_loops": list(each.unknown_loops),
            "time": dataclasses.asdict(clock) | {"total_s": clock.total_s, "best_s": clock.best_s},
        }
    result = {
        "config": name,
        "topology": slice_.name,
        "mesh": dict(mesh.shape),
        "num_params": num_params,
        "chips": slice_.num_chips,
        "hbm_bytes_per_chip": slice_.chip.hbm_bytes,
        "programs": programs,
    }
    if num_adapter_params is not None:
        result["num_adapter_params"] = num_adapter_params
    if {"gradient", "optimizer"} <= set(programs):
        parts = [programs["gradient"], programs["optimizer"]]
        seconds = sum(p["time"]["total_s"] for p in parts)
        best = sum(p["time"]["best_s"] for p in parts)
        peak = slice_.num_chips * slice_.chip.flops_per_s
        result["step"] = {
            "tokens": parts[0]["tokens"],
            "seconds": seconds,
            "tokens_per_s": parts[0]["tokens"] / seconds,
            "mfu": parts[0]["model_flops"] / (seconds * peak),
            "mfu_best": parts[0]["model_flops"] / (best * peak),
            "peak_share_for_half": _peak_share_for_half(parts, 2 * parts[0]["model_flops"] / peak),
            "hardware_utilisation": parts[0]["hardware_flops"] / (seconds * peak),
        }
    return result


def _unit(values: Iterable[float], units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The first unit in which the largest value is 0.1 or more, else the last."""
    largest = max(values, default=0.0)
    return next((unit for unit in units if largest >= 0.1 * unit[0]), units[-1])


def _byte_unit(result: dict[str, Any]) -> tuple[float, str]:
    peaks = (p["peak_bytes"] for p in result["programs"].values())
    return _unit(peaks, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")))


def _traffic_unit(result: dict[str, Any]) -> tuple[float, str]:
    traffic = (c["num_bytes"] for p in result["programs"].values() for c in p["collectives"])
    return _unit(traffic, ((1e9, "GB"), (1e6, "MB")))


def _time_unit(result: dict[str, Any]) -> tuple[float, str]:
    times = (p["time"]["total_s"] for p in result["programs"].values())
    return _unit(times, ((1e-3, "ms"), (1e-6, "us")))


def _many(count: float) -> str:
    """A number of parameters."""
    scale, unit = next(((s, u) for s, u in ((1e9, "B"), (1e6, "M")) if count >= s), (1e3, "K"))
    return f"{count / scale:.2f}{unit}"


def _percent(share: float, decimals: int = 0) -> str:
    """A share, with two digits where it would be rounded to nothing."""
    small = 0 < share < 10 ** (-2 - decimals)
    return f"{100 * share:.2g}%" if small else f"{share:.{decimals}%}"


def _duration(seconds: float) -> str:
    scale, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.2f} {unit}"


def _memory_rows(result: dict[str, Any]) -> list[list[str]]:
    rows, (unit, _) = [], _byte_unit(result)
    for name, p in result["programs"].items():
        parts = ("argument", "output", "temporary", "resident", "peak")
        share = p["peak_bytes"] / result["hbm_bytes_per_chip"]
        rows.append(
            [name, *(f"{p[f'{part}_bytes'] / unit:,.2f}" for part in parts), _percent(share)]
        )
    return rows


def _time_rows(result: dict[str, Any]) -> list[list[str]]:
    rows, (unit, _) = [], _time_unit(result)
    for name, p in result["programs"].items():
        t = p["time"]
        columns = ("compute_s", "memory_s", "collective_s", "total_s", "best_s")
        times = (f"{t[column] / unit:,.1f}" for column in columns)
        rows.append([name, f"{p['tokens']:,}", *times])
    return rows


def _collective_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [name, c["kind"], f"{c['count']:,}", f"{c['num_bytes'] / _traffic_unit(result)[0]:,.2f}"]
        + [f"{c['seconds'] / _time_unit(result)[0]:,.1f}"]
        for name, p in result["programs"].items()
        for c in p["collectives"]
        if c["num_bytes"] >= 1e6
    ]


_TABLES = (
    (
        "Memory per chip, {bytes}",
        ["program", "arguments", "outputs", "temporaries", "other arrays", "peak", "of HBM"],
        _memory_rows,
    ),
    (
        "Predicted time of one run, {time}",
        ["program", "tokens", "compute", "memory", "collectives", "time", "all overlap"],
        _time_rows,
    ),
    (
        "Collectives of one run per chip (1 MB or more)",
        ["program", "kind", "count", "{traffic}", "{time}"],
        _collective_rows,
    ),
)


def _tables(result: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of each table, in units that leave something to read."""
    units = {
        "bytes": _byte_unit(result)[1],
        "time": _time_unit(result)[1],
        "traffic": _traffic_unit(result)[1],
    }
    for title, columns, rows in _TABLES:
        yield title.format(**units), [c.format(**units) for c in columns], rows(result)


def headline(result: dict[str, Any]) -> str:
    """The prediction in a few sentences."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1)
    text = (
        f"{result['config']}: {_many(result['num_params'])} parameters on {result['chips']} "
        f"chips ({result['topology']}, mesh {mesh or '1'})."
    )
    if adapters := result.get("num_adapter_params"):
        text += (
            f" Trained are adapters of {adapters:,} numbers "
            f"({adapters / result['num_params']:.2%}), the rest is frozen."
        )
    if "step" not in result:
        return text
    step = result["step"]
    share = step["peak_share_for_half"]
    if share is None or share > 1:
        half = "An MFU of 50% is out of reach"
    else:
        half = f"It is 50% or more where products reach {share:.0%} of the peak"
    return (
        f"{text} An optimiser step of {step['tokens']:,} tokens takes "
        f"{_duration(step['seconds'])}: "
        f"{step['tokens_per_s']:,.0f} tokens/s, MFU {_percent(step['mfu'], 1)} "
        f"({_percent(step['mfu_best'], 1)} if collectives hide behind arithmetic; "
        f"{_percent(step['hardware_utilisation'], 1)} of the peak with what is computed twice). "
        f"{half}."
    )


def show(result: dict[str, Any], console: rich.console.Console) -> None:
    """Prints the tables."""
    for title, columns, rows in _tables(result):
        table = rich.table.Table(title=title, title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(column, justify="right" if i and column != "kind" else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(headline(result), highlight=False)


def to_markdown(result: dict[str, Any], command: str) -> str:
    """The tables as a page of the documentation.

    Args:
      result: from `report`.
      command: that made it.
    """
    lines = [f"# {result['config']} on {result['topology']}", "", headline(result), ""]
    versions = " and ".join(f"{p} {v}" for p, v in result.get("versions", {}).items())
    lines += [
        f"Compiled ahead of time{f' with {versions}' if versions else ''}: times are those of a "
        "roofline, nothing here was measured on a chip.",
        "",
    ]
    lines += ["```", command, "```", ""]
    for title, columns, rows in _tables(result):
        lines += [f"## {title}", "", "| " + " | ".join(columns) + " |"]
        lines += ["|" + "|".join(" --- " for _ in columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        lines.append("")
    lines += [
        "How to read it: `focus/tpu/report.py` (roofline and its assumptions), "
        "`focus/tpu/flops.py` (formulas), `focus/tpu/chips.py` (data sheets).",
        "",
    ]
    return "\n".join(lines)
