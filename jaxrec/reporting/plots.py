"""The pictures of reports: bars, stacked bars and lines, as SVG text that depends on its arguments alone.

A picture is readable on light and on dark: its ground is transparent, and its text and lines have the colour that a
style sheet inside the SVG gives them, by the reader's preference. Text is drawn as outlines, so that no font is needed.
Whatever needs room (title, legend, labels, values at the ends of bars) is measured before it is placed.

matplotlib is imported when the first picture is drawn, not before: a study's report.py may import this module, and
measuring still imports no plotting.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxrec.checks import import_package
from jaxrec.profiling.regions import OTHER

# The first ones are Okabe and Ito's ("Color Universal Design", 2008); the others were chosen so that all remain apart
# for readers who do not tell red from green, and stand out from white and from black. tests/test_plots.py measures it.
STACK_COLORS = {
    "jax": "#0072b2", "pytorch-eager": "#d55e00", "pytorch-compiled": "#8844ee", "pytorch-fbgemm": "#009e73",
}  # fmt: skip
REGION_COLORS = {
    "embedding_lookup": "#0072b2", "bottom_mlp": "#e69f00", "interaction": "#009e73", "top_mlp": "#d55e00",
    "loss": "#7777ff", "gradient_sum": "#7700ff", "clip": "#882200", "dense_update": "#88cc77",
    "embedding_update": "#56b4e9", "finite_check": "#2233aa", OTHER: "#4d4d4d",
}  # fmt: skip
# What has no colour of its own takes these in turn, but for those that a name beside it has.
OTHER_COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#8844ee", "#e69f00", "#56b4e9", "#88cc77", "#882200", "#2233aa", "#4d4d4d",
)  # fmt: skip
INK_LIGHT, INK_DARK = "#1f2328", "#e6edf3"

# Sizes are in points.
_WIDTH, _MARGIN, _SIZE, _LINE = 560, 10, 9, 12
_BAR, _PITCH, _GAP = 12, 15, 12
_STACK, _STACK_PITCH = 18, 26
_TICK_ROOM, _UNIT_ROOM = 18, 16
_LINES_HEIGHT = 220
_LABEL_CHARACTERS, _TITLE_CHARACTERS = 26, 84
_TICK_STEPS = (1, 2, 2.5, 5, 10)
_MARKERS = "osD^vPX*"
# Drawn in place of the colour of text and lines, then replaced by what the style sheet says.
_INK = "#010203"
# From which size on, what it is divided by, what says so.
_PREFIXES = ((1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k"))

Values = Sequence[float | None]
Spreads = Mapping[str, Sequence[tuple[float, float] | None]]


def grouped_bars(
    groups: Sequence[str], series: Mapping[str, Values], *, unit: str, title: str, spreads: Spreads | None = None
) -> str:
    """Returns horizontal bars, grouped.

    Args:
      groups: Labels, from the top.
      series: Name -> a value a group, or None where there is none.
      unit: Of the values; the axis's label.
      title: A sentence or less.
      spreads: Name -> (low, high) a group, drawn as whiskers, or None.
    """
    _require_lengths(len(groups), {**series, **{f"the spread of {k}": v for k, v in (spreads or {}).items()}})
    with _style():
        sheet = _Sheet(title, colors(series), list(groups))
        rooms = [max(len(series) * _PITCH, sheet.lines(label) * _LINE) + _GAP for label in groups]
        bars = []  # (top, value, spread, name)
        for g, top in enumerate(_tops(rooms)):
            first = top + (rooms[g] - len(series) * _PITCH) / 2
            for s, (name, values) in enumerate(series.items()):
                spread = (spreads or {}).get(name)
                bars.append((first + s * _PITCH + (_PITCH - _BAR) / 2, values[g], spread[g] if spread else None, name))
        reach = [(max(_reach(v, s)), "\N{EN DASH}" if v is None else number(v)) for _, v, s, _ in bars]
        low = min((min(_reach(v, s)) for _, v, s, _ in bars), default=0.0)
        axes = sheet.bar_axes(rooms, low, reach, unit)
        for (top, value, spread, name), (end, text) in zip(bars, reach, strict=True):
            middle = top + _BAR / 2
            if value is not None:
                axes.barh(middle, value, height=_BAR, color=sheet.legend[name])
            if spread is not None:
                axes.plot(spread, (middle, middle), color=_INK, linewidth=1, solid_capstyle="butt")
                axes.plot(spread, (middle, middle), color=_INK, linestyle="none", marker="|", markersize=5)
            sheet.write_after(axes, end, middle, text)
        return _svg(sheet.figure, title)


def stacked_bars(bars: Sequence[str], parts: Mapping[str, Sequence[float]], *, unit: str, title: str) -> str:
    """Returns horizontal stacked bars, with each bar's total at its end.

    Args:
      bars: Labels, from the top.
      parts: Name -> a value a bar, 0 or more, from the left.
      unit: Of the values; the axis's label.
      title: A sentence or less.
    """
    _require_lengths(len(bars), parts)
    if any(value < 0 for values in parts.values() for value in values):
        raise ValueError("a part of a stacked bar is negative")
    with _style():
        sheet = _Sheet(title, colors(parts), list(bars))
        rooms = [max(_STACK_PITCH, sheet.lines(label) * _LINE + 4) for label in bars]
        totals = [sum(values[b] for values in parts.values()) for b in range(len(bars))]
        reach = [(total, number(total)) for total in totals]
        axes = sheet.bar_axes(rooms, 0.0, reach, unit)
        points_per_unit = axes.bbox.width / (axes.get_xlim()[1] - axes.get_xlim()[0])
        for b, top in enumerate(_tops(rooms)):
            left, middle = 0.0, top + rooms[b] / 2
            for name, values in parts.items():
                value, color, room = values[b], sheet.legend[name], values[b] * points_per_unit
                # A slit between neighbours tells them apart where their colours do not.
                slit = 0.8 / points_per_unit if room > 3 else 0.0
                axes.barh(middle, value - slit, left=left, height=_STACK, color=color)
                if sheet.width(number(value)) + 4 <= room:
                    ink = "#000000" if luminance(color) > 0.18 else "#ffffff"
                    axes.text(left + value / 2, middle, number(value), color=ink, ha="center", va="center_baseline")
                left += value
            sheet.write_after(axes, totals[b], middle, number(totals[b]))
        return _svg(sheet.figure, title)


def points(
    x: Sequence[float],
    series: Mapping[str, Values],
    *,
    x_unit: str,
    unit: str,
    title: str,
    spreads: Spreads | None = None,
    log_x: bool = False,
) -> str:
    """Returns lines with markers.

    Args:
      x: Positions, ascending.
      series: Name -> a value a position, or None where there is none.
      x_unit: Of the positions; the axis's label.
      unit: Of the values; the label above the other axis.
      title: A sentence or less.
      spreads: Name -> (low, high) a position, drawn as whiskers, or None.
      log_x: Whether the positions' axis is logarithmic.
    """
    spreads = spreads or {}
    _require_lengths(len(x), {**series, **{f"the spread of {k}": v for k, v in spreads.items()}})
    every = [spread for values in spreads.values() for spread in values if spread is not None]
    known = [v for values in series.values() for v in values if v is not None] + [v for s in every for v in s]
    low, high = min(known, default=0.0), max(known, default=1.0)
    # From zero, unless that would flatten what differs.
    low = min(low, 0.0) if low < high / 2 else low - 0.08 * (high - low or abs(high))
    high += 0.08 * (high - low)
    with _style():
        from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

        ticks = [t for t in MaxNLocator(6, steps=_TICK_STEPS).tick_values(low, high) if low <= t <= high]
        texts = tick_texts(ticks)
        sheet = _Sheet(title, colors(series), texts, marked=True)
        axes = sheet.line_axes(unit, x_unit)
        axes.set_xscale("log" if log_x else "linear")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        for k, (name, values) in enumerate(series.items()):
            drawn = [(at, v, s) for at, v, s in zip(x, values, spreads.get(name, [None] * len(x)), strict=True)]
            color, marker = sheet.legend[name], _MARKERS[k % len(_MARKERS)]
            for at, _, spread in drawn:
                if spread is not None:
                    axes.plot((at, at), spread, color=color, linewidth=1, marker="_", markersize=6)
            ys = [math.nan if v is None else v for _, v, _ in drawn]
            axes.plot(x, ys, color=color, linewidth=1.6, marker=marker, markersize=5)
        axes.set_ylim(low, high)
        axes.set_yticks(ticks, texts)
        axes.grid(axis="y", color=_INK, alpha=0.15, linewidth=0.6)
        sheet.place_x_ticks(axes, sorted(set(x)))
        return _svg(sheet.figure, title)


def colors(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> colour: a stack's or a region's own; the others' in their order."""
    names = list(names)
    own = {n: STACK_COLORS.get(n) or REGION_COLORS.get(n) for n in names}
    free = [c for c in OTHER_COLORS if c not in own.values()] or list(OTHER_COLORS)
    others = [n for n in names if own[n] is None]
    return {n: own[n] or free[others.index(n) % len(free)] for n in names}


def number(value: float) -> str:
    """Returns a value as it stands at the end of its bar: three digits or more, from 10,000 on with k, M, G or T."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-4:
        return f"{value:.2g}"
    scale, prefix = _prefix(size)
    digits = max(0, 2 - math.floor(math.log10(size / scale)))
    return f"{value / scale:,.{digits}f}{prefix}"


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Returns the texts of an axis's ticks, all with the same prefix and number of decimals."""
    scale, prefix = _prefix(max((abs(t) for t in ticks), default=0.0))
    shortest = [f"{t / scale:.6g}" for t in ticks]
    if any("e" in text for text in shortest):
        return shortest
    digits = max((len(text.partition(".")[2]) for text in shortest), default=0)
    return ["0" if float(text) == 0 else f"{float(text):,.{digits}f}{prefix}" for text in shortest]


def _prefix(size: float) -> tuple[float, str]:
    """Returns what a number of this size is divided by, and the prefix that says so."""
    return next(((scale, prefix) for least, scale, prefix in _PREFIXES if size >= least), (1.0, ""))


def luminance(color: str) -> float:
    """Returns the relative luminance of `#rrggbb`, 0 to 1 (WCAG 2.1)."""
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


class _Sheet:
    """A figure under construction: title and legend above, labels at the left, room for the rest.

    Attributes:
      figure: matplotlib's; one of its pixels is one point.
      legend: Name -> colour.
    """

    def __init__(self, title: str, legend: Mapping[str, str], labels: Sequence[str], *, marked: bool = False):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure: Any = Figure(figsize=(_WIDTH / 72, 1), dpi=72)
        FigureCanvasAgg(self.figure)  # It measures text.
        self.legend, self._marked = dict(legend), marked
        self._title = textwrap.wrap(title, _TITLE_CHARACTERS)
        self._labels = [textwrap.fill(label, _LABEL_CHARACTERS) for label in labels]
        self._left = _MARGIN + max((self.width(label) for label in self._labels), default=0) + 8
        self._rows: list[list[tuple[str, float]]] = [[]]  # Of the legend: (name, left).
        at = float(_MARGIN)
        for name in legend if len(legend) > 1 else ():
            taken = 16 + self.width(name) + 14
            if self._rows[-1] and at + taken > _WIDTH:
                self._rows.append([])
                at = float(_MARGIN)
            self._rows[-1].append((name, at))
            at += taken
        if not self._rows[-1]:
            self._rows.pop()
        self._head = 6 + 14 * len(self._title) + 15 * len(self._rows) + 8

    def width(self, text: str) -> float:
        """Returns the width of a text, in points."""
        artist = self.figure.text(0, 0, text)
        width = artist.get_window_extent().width
        artist.remove()
        return width

    def lines(self, label: str) -> int:
        """Returns how many lines a label takes."""
        return len(textwrap.wrap(label, _LABEL_CHARACTERS))

    def bar_axes(self, rooms: Sequence[float], low: float, reach: Sequence[tuple[float, str]], unit: str) -> Any:
        """Returns axes whose y is in points, downwards.

        Args:
          rooms: The height of each label's part.
          low: Where the values' axis begins.
          reach: (end, text) of each bar, so that all the texts find room behind the ends.
          unit: The axis's label.
        """
        from matplotlib.ticker import MaxNLocator

        height, width = sum(rooms), _WIDTH - self._left - _MARGIN
        axes = self._axes(height, _TICK_ROOM + _UNIT_ROOM)
        ends = [(end - low) * width / (width - self.width(text) - 8) for end, text in reach]
        high = low + (max(ends, default=0.0) or 1.0)
        axes.set_xlim(low, high)
        axes.set_ylim(height, 0)
        ticks = [t for t in MaxNLocator(5, steps=_TICK_STEPS).tick_values(low, high) if low <= t <= high]
        axes.set_xticks(ticks, tick_texts(ticks))
        axes.set_yticks([top + room / 2 for top, room in zip(_tops(rooms), rooms, strict=True)], self._labels)
        axes.grid(axis="x", color=_INK, alpha=0.15, linewidth=0.6)
        axes.axvline(0, color=_INK, linewidth=0.8)
        self._below(axes, unit)
        return axes

    def line_axes(self, unit: str, x_unit: str) -> Any:
        """Returns axes of a fixed height, with both units written."""
        self._head += _UNIT_ROOM
        axes = self._axes(_LINES_HEIGHT, _TICK_ROOM + _UNIT_ROOM)
        self._write(_MARGIN, self._head - 8, unit)
        axes.spines["bottom"].set_visible(True)
        self._below(axes, x_unit)
        return axes

    def place_x_ticks(self, axes: Any, positions: Sequence[float]) -> None:
        """Puts ticks at as many of the positions, from the left, as have room for their text."""
        texts = [f"{p:,.0f}" if p == round(p) and abs(p) < 1e6 else number(p) for p in positions]
        kept, free = [], -math.inf
        for position, text in zip(positions, texts, strict=True):
            at, half = axes.transData.transform((position, axes.get_ylim()[0]))[0], self.width(text) / 2
            if at - half >= free:
                kept.append((position, text))
                free = at + half + 6
        axes.set_xticks([p for p, _ in kept], [t for _, t in kept])

    def write_after(self, axes: Any, end: float, middle: float, text: str) -> None:
        """Writes a bar's value behind its end."""
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center_baseline"}
        axes.annotate(text, (end, middle), color=_INK, **place)

    def _axes(self, height: float, below: float) -> Any:
        """Gives the figure its height, writes title and legend, and returns axes between them and what is below."""
        total = self._head + height + below
        self.figure.set_size_inches(_WIDTH / 72, total / 72)
        for k, line in enumerate(self._title):
            self._write(_MARGIN, 6 + 14 * k + 10, line, weight="bold", size=10)
        for r, row in enumerate(self._rows):
            for k, (name, left) in enumerate(row):
                top = 6 + 14 * len(self._title) + 15 * r + 6
                self._sample(name, left, top, r, k)
                self._write(left + 16, top + 8.5, name)
        width = _WIDTH - self._left - _MARGIN
        axes = self.figure.add_axes((self._left / _WIDTH, below / total, width / _WIDTH, height / total))
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
        axes.tick_params(length=0, pad=5)
        return axes

    def _sample(self, name: str, left: float, top: float, row: int, k: int) -> None:
        """Draws the sample of a legend's entry."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle

        height = self.figure.bbox.height
        if self._marked:
            marker = _MARKERS[list(self.legend).index(name) % len(_MARKERS)]
            xs, ys = (left, left + 6, left + 12), (height - top - 5,) * 3
            line = Line2D(xs, ys, color=self.legend[name], linewidth=1.6, marker=marker, markersize=5, markevery=[1])
            line.set_transform(None)
            self.figure.add_artist(line)
        else:
            box = Rectangle((left, height - top - 10), 11, 10, color=self.legend[name], linewidth=0)
            box.set_transform(None)
            self.figure.add_artist(box)

    def _below(self, axes: Any, unit: str) -> None:
        """Writes a unit under the axes' middle."""
        middle = self._left + (_WIDTH - self._left - _MARGIN) / 2
        self._write(middle, self.figure.bbox.height - 5, unit, ha="center")

    def _write(self, left: float, base: float, text: str, **how: Any) -> None:
        """Writes a text; its base line is so far from the top."""
        height = self.figure.bbox.height
        self.figure.text(left / _WIDTH, 1 - base / height, text, color=_INK, **how)


def _require_lengths(count: int, series: Mapping[str, Sequence[Any]]) -> None:
    for name, values in series.items():
        if len(values) != count:
            raise ValueError(f"{name} has {len(values)} values, but there are {count} labels or positions")


def _tops(rooms: Sequence[float]) -> Iterator[float]:
    for k in range(len(rooms)):
        yield sum(rooms[:k])


def _reach(value: float | None, spread: tuple[float, float] | None) -> tuple[float, ...]:
    """Returns where a bar and its whisker begin and end; a bar begins at 0."""
    return (0.0, value or 0.0, *(spread or ()))


@contextmanager
def _style() -> Iterator[None]:
    """Draws by settings of this module's own, not by the user's."""
    matplotlib = import_package("matplotlib", "pictures of reports need the package matplotlib", "'jaxrec[report]'")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({
            "font.family": "DejaVu Sans", "font.size": _SIZE, "svg.fonttype": "path", "svg.hashsalt": "jaxrec",
            "text.parse_math": False, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK,
            "axes.labelcolor": _INK, "axes.edgecolor": _INK, "figure.facecolor": "none", "axes.facecolor": "none",
        })  # fmt: skip
        yield


def _svg(figure: Any, title: str) -> str:
    """Returns a figure's SVG, for an <img> and for a page that holds several."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    body = text[text.index('<g id="figure_1"') : text.rindex("</svg>")]
    body = body.replace(_INK, "currentColor")
    # Outlines are the most of it: one line each.
    body = re.sub(r' d="([^"]*)"', lambda m: f' d="{" ".join(m[1].split())}"', body)
    body += "".join(re.findall(r"<defs>\s*<clipPath.*?</defs>", text[: text.index('<g id="figure_1"')], re.S))
    body = _own_ids(body)
    width, height = figure.bbox.width, figure.bbox.height
    ink = f"svg.plot{{color:{INK_LIGHT}}}@media (prefers-color-scheme:dark){{svg.plot{{color:{INK_DARK}}}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" class="plot" role="img" '
        f'width="{width:g}pt" height="{height:g}pt" viewBox="0 0 {width:g} {height:g}" '
        f'stroke-linejoin="round" stroke-linecap="butt">\n'
        f"<title>{html.escape(title)}</title>\n<style>{ink}</style>\n{body.rstrip()}\n</svg>\n"
    )


def _own_ids(body: str) -> str:
    """Drops the ids that nothing refers to, and gives the others names that no other picture has."""
    prefix = "p" + hashlib.sha256(body.encode()).hexdigest()[:10]
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', body))
    names = {old: f"{prefix}-{k}" for k, old in enumerate(used)}
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{names[m[1]]}"' if m[1] in names else "", body)
    return re.sub(r'(href="|url\()#([^")]+)', lambda m: f"{m[1]}#{names[m[2]]}", body)
