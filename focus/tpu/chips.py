"""What the chips can do, by their makers' data sheets.

TPU figures are those of Google Cloud's pages on each generation (cloud.google.com/tpu/docs/v5e,
v5p, v6e, "key specifications"): peak bfloat16 FLOP/s, HBM capacity and bandwidth, and the
bandwidth of the interconnect, which the pages give per chip in both directions together: divided
by two and by the number of links it is that of one link in one direction. GPU figures are those
of NVIDIA's H100 and H200 SXM data sheets (dense bfloat16).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TPU chip.

    Attributes:
      name: as in the name of a topology.
      flops_per_s: peak bfloat16 FLOP/s.
      hbm_bytes: memory.
      hbm_bytes_per_s: its bandwidth.
      link_bytes_per_s: bandwidth of one interconnect link in one direction.
      wrap: chips along an axis of a slice from which on its ends are joined to a ring.
      slices: shapes that are offered, smallest first; larger ones exist.
    """

    name: str
    flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    wrap: int
    slices: tuple[str, ...] = ()


_SLICES_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SLICES_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")

TPUS = {
    chip.name: chip
    for chip in (
        # Of its 16 GiB the compiler gives a program 15.75.
        Chip("v5e", 197e12, 15.75 * GIB, 819e9, 50e9, wrap=16, slices=_SLICES_2D),
        Chip("v5p", 459e12, 95 * GIB, 2765e9, 100e9, wrap=4, slices=_SLICES_3D),
        Chip("v6e", 918e12, 32 * GIB, 1640e9, 100e9, wrap=16, slices=_SLICES_2D),
    )
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of a rollout server.

    Attributes:
      name: product.
      flops_per_s: peak dense bfloat16 FLOP/s.
      hbm_bytes: memory.
      hbm_bytes_per_s: its bandwidth.
      link_bytes_per_s: NVLink bandwidth to the other GPUs of the server in one direction.
    """

    name: str
    flops_per_s: float
    hbm_bytes: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 989e12, 80e9, 3.35e12, 450e9),
        Gpu("H200", 989e12, 141e9, 4.8e12, 450e9),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips of one kind joined by their interconnect.

    Attributes:
      chip: the kind.
      shape: chips along each axis of the torus.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As given on the command line, "v5p:4x4x4"."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(self.shape)

    def ring_bytes_per_s(self, coords: Sequence[tuple[int, ...]]) -> float:
        """Bandwidth at which each of some chips can take in what all of them hold.

        The chips are taken to be a box of the torus. Along each of its axes data comes in through
        two links where the axis is a closed ring and through one where it is a line, whose ends
        set the pace; the axes work at the same time.

        Args:
          coords: place of each chip of a group on the torus.

        Returns:
          Bytes per second into one chip.
        """
        total = 0.0
        for axis, size in enumerate(self.shape):
            places = {place[axis] for place in coords}
            if len(places) > 1:
                ring = len(places) == size and size % self.chip.wrap == 0
                total += self.chip.link_bytes_per_s * (2 if ring else 1)
        return total or self.chip.link_bytes_per_s


def parse_topology(text: str) -> Slice:
    """A slice by name.

    Args:
      text: chip and chips along each axis, "v5p:4x4x4" or "v5e:8x8".

    Returns:
      The slice.

    Raises:
      ValueError: not of this form, or a chip that is not in `TPUS`.
    """
    name, _, sizes = text.partition(":")
    if name not in TPUS:
        raise ValueError(
            f"unknown chip {name!r} in topology {text!r}: choose one of {', '.join(TPUS)}"
        )
    axes = 2 if name in ("v5e", "v6e") else 3
    parts = sizes.split("x")
    if len(parts) != axes or not all(part.isdigit() and int(part) > 0 for part in parts):
        example = {2: "4x4", 3: "2x2x1"}[axes]
        raise ValueError(
            f"topology {text!r} must give the chips along {axes} axes, for example {name}:{example}"
        )
    return Slice(TPUS[name], tuple(int(part) for part in parts))
