"""A small plotting surface: data coordinates in, inline SVG out.

Colours are the page's CSS variables, so one drawing serves the light and the dark scheme and
print. Every mark can carry a title, which a browser shows as its tooltip, and is kept as a row of
the figure's table.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Sequence

from markupsafe import Markup, escape

WIDTH = 460
HEIGHT = 268
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 44


@dataclasses.dataclass(frozen=True)
class Chart:
    """One figure of the page.

    Attributes:
      title: its heading.
      svg: the drawing; empty when it was left out.
      legend: `(css class, mark, label)`; marks are "line", "dash", "dot" and "box".
      note: how to read it, or why it was left out.
      csv: what is drawn, as a table; "" if nothing is.
    """

    title: str
    svg: Markup = Markup("")
    legend: tuple[tuple[str, str, str], ...] = ()
    note: str = ""
    csv: str = ""


# Points of a line that answer to the mouse; longer lines answer at every so many.
MAX_HOVER = 120


class Plot:
    """Axes with marks. Give ranges in data units; `render` returns the SVG.

    Args:
      x_range: left and right end.
      y_range: lower and upper end.
      x_label: label of the horizontal axis, with its unit.
      y_label: label of the vertical axis, with its unit.
      x_ticks: `(position, text)`; round numbers by default.
      y_ticks: likewise.
      grid: whether horizontal lines are drawn at the ticks.
    """

    def __init__(
        self,
        x_range: tuple[float, float],
        y_range: tuple[float, float],
        x_label: str,
        y_label: str,
        *,
        x_ticks: Sequence[tuple[float, str]] | None = None,
        y_ticks: Sequence[tuple[float, str]] | None = None,
        grid: bool = True,
    ):
        self.x_range = widened(*x_range)
        self.y_range = widened(*y_range)
        self.label = f"{y_label} against {x_label}"
        self._columns = x_label, y_label
        self._marks: list[str] = []
        self._rows: list[tuple[str, str, float, float, float, float, str]] = []
        self._axes(x_label, y_label, x_ticks, y_ticks, grid)

    def x(self, value: float) -> float:
        """Horizontal pixel of a data value."""
        low, high = self.x_range
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical pixel of a data value."""
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def line(
        self,
        xs: Sequence[float],
        ys: Sequence[float | None],
        css: str,
        *,
        dashed: bool = False,
        label: str = "",
    ) -> None:
        """A line that is broken where a value is missing.

        With a label its points tell their values under the mouse and are rows of the table.
        """
        run: list[str] = []
        for x, y in [*zip(xs, ys), (None, None)]:
            if y is not None:
                run.append(f"{self.x(x):.1f},{self.y(y):.1f}")
            elif run:
                style = ' stroke-dasharray="5 4"' if dashed else ""
                if len(run) > 1:
                    self._add(
                        f'<polyline class="{css} stroke" points="{" ".join(run)}"{style}>'
                        f"{_title(label)}</polyline>"
                    )
                run = []
        if not label:
            return
        points = [(x, y) for x, y in zip(xs, ys) if y is not None]
        for x, y in points:
            self._row("line", css, (x, x), (y, y), label)
        for x, y in points[:: -(-len(points) // MAX_HOVER) or 1]:
            self._add(
                f'<circle class="hover" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="7">'
                f"{_title(f'{label} at {short(x)}: {y:.4g}')}</circle>"
            )

    def dot(self, x: float, y: float, css: str, title: str, *, radius: float = 3.5) -> None:
        """A filled circle."""
        self._row("dot", css, (x, x), (y, y), title)
        self._add(
            f'<circle class="{css} fill" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
            f'r="{radius}">{_title(title)}</circle>'
        )

    def interval(self, x: float, low: float, high: float, css: str) -> None:
        """A vertical confidence interval."""
        self._row("interval", css, (x, x), (low, high), "95 % interval")
        x_px = self.x(x)
        self._add(
            f'<path class="{css} stroke" d="M{x_px:.1f} {self.y(low):.1f}V{self.y(high):.1f}'
            f"M{x_px - 3:.1f} {self.y(low):.1f}h6M{x_px - 3:.1f} {self.y(high):.1f}h6"
            f'"/>'
        )

    def box(
        self,
        x_span: tuple[float, float],
        y_span: tuple[float, float],
        css: str,
        title: str,
        *,
        opacity: float = 1.0,
    ) -> None:
        """A filled rectangle."""
        self._row("box", css, x_span, y_span, title)
        left, right = self.x(x_span[0]), self.x(x_span[1])
        top, bottom = self.y(y_span[1]), self.y(y_span[0])
        self._add(
            f'<rect class="{css} fill" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
            f'height="{bottom - top:.1f}" fill-opacity="{opacity:.3g}">{_title(title)}</rect>'
        )

    def text(self, x: float, y: float, text: str, *, css: str = "small", dy: float = 4) -> None:
        """Centred text, `dy` pixels below the point."""
        self._add(
            f'<text class="{css}" x="{self.x(x):.1f}" y="{self.y(y) + dy:.1f}" '
            f'text-anchor="middle">{escape(text)}</text>'
        )

    def render(self) -> Markup:
        """The finished drawing."""
        return Markup(
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.label)}">'
            + "".join(self._marks)
            + "</svg>"
        )

    def chart(
        self, title: str, legend: Sequence[tuple[str, str, str]] = (), note: str = ""
    ) -> Chart:
        """The finished figure with its table."""
        names: dict[str, str] = {}
        for css, _, label in legend:
            names.setdefault(css, label)
        x_label, y_label = self._columns
        columns = "mark", "series", x_label, f"{x_label}, to", y_label, f"{y_label}, to", "text"
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for mark, css, *numbers, text in self._rows:
            series = names.get(css.split()[0], "")
            writer.writerow([mark, series, *(f"{number:.6g}" for number in numbers), text])
        return Chart(title, self.render(), tuple(legend), note, file.getvalue())

    def _row(self, mark: str, css: str, xs, ys, text: str) -> None:
        self._rows.append((mark, css, *map(float, (*xs, *ys)), text))

    def _add(self, mark: str) -> None:
        self._marks.append(mark)

    def _axes(self, x_label, y_label, x_ticks, y_ticks, grid) -> None:
        if x_ticks is None:
            x_ticks = [(t, short(t)) for t in round_ticks(*self.x_range)]
        if y_ticks is None:
            y_ticks = [(t, short(t)) for t in round_ticks(*self.y_range)]
        bottom = HEIGHT - BOTTOM
        for value, text in y_ticks:
            y_px = self.y(value)
            if grid:
                self._add(f'<path class="gridline" d="M{LEFT} {y_px:.1f}H{WIDTH - RIGHT}"/>')
            self._add(
                f'<text class="tick" x="{LEFT - 6}" y="{y_px + 4:.1f}" '
                f'text-anchor="end">{escape(text)}</text>'
            )
        for value, text in x_ticks:
            self._add(
                f'<text class="tick" x="{self.x(value):.1f}" y="{bottom + 16}" '
                f'text-anchor="middle">{escape(text)}</text>'
            )
        middle = (TOP + bottom) / 2
        self._add(
            f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>'
            f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" '
            f'text-anchor="middle">{escape(x_label)}</text>'
            f'<text class="label" text-anchor="middle" '
            f'transform="translate(12 {middle}) rotate(-90)">{escape(y_label)}</text>'
        )


def widened(low: float, high: float) -> tuple[float, float]:
    """A range of a single point has no width to draw in; give it some."""
    if low == high:
        return low - 0.5, high + 0.5
    return low, high


def round_ticks(low: float, high: float, target: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten inside the range, about `target` of them."""
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def whole_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Ticks for an axis of steps: there is no step 2.5."""
    return [(t, short(t)) for t in round_ticks(*widened(low, high)) if t == int(t)]


def short(value: float) -> str:
    """A number in at most five or so characters: 0.25, 1.2k, 3M."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= scale:
            divisor = 1e3 if suffix == "k" else scale
            return f"{value / divisor:.3g}{suffix}"
    if value == int(value):
        return f"{int(value)}"
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
