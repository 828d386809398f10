"""The common style of all figures: colours of families, frames, units, footer."""

from __future__ import annotations

import os
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


Share = Literal["none", "all", "row", "col"]

DPI = 150
WIDTH_IN = 8.0
HEIGHT_IN = 5.0
INK = "#222222"
FAINT = "#d9d9d9"
LABEL_PT = 10
TICK_PT = 9
NOTE_PT = 7
LINE_STYLES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

#: Colour and marker of each family; both differ, so that families stay distinct without colour and
#: in print.
FAMILY_STYLES = {
    "none": ("#222222", "X"),
    "kv_only": ("#7f7f7f", "P"),
    "block_hash": ("#0072b2", "s"),
    "vllm": ("#000080", "H"),
    "radix": ("#332288", "D"),
    "block": ("#56b4e9", "o"),
    "balanced": ("#117733", "^"),
    "sqrt": ("#999933", "v"),
    "log": ("#44aa99", "<"),
    "dp": ("#d55e00", "p"),
    "last": ("#aa4499", ">"),
    "tail": ("#b15928", "8"),
    "boundary": ("#882255", "*"),
    "branch": ("#cc6677", "h"),
    "mixed": ("#e69f00", "d"),
    # position-independent methods share figures with the first four only: they are for models
    # without states
    "pic": ("#009e73", "o"),
    "lego_link": ("#ee7733", "^"),
    "cache_blend": ("#cc3311", "v"),
    "query_aware": ("#4b0092", "p"),
    "neighbour_aware": ("#33bbee", "*"),
    "ape": ("#ee3377", "<"),
    "as_seen": ("#997700", ">"),
    "control": ("#bbbbbb", "h"),
    "cached_order": ("#004d40", "d"),
    # one pool of blocks, with and without tiers below it
    "device_alone": ("#222222", "X"),
    "load_always": ("#cc3311", "v"),
    "break_even": ("#0072b2", "o"),
}
_SPARE_COLOURS = ("#6a3d9a", "#6b4226", "#00a5cf", "#e7298a", "#66a61e", "#4a6fe3", "#8c6d31")
_SPARE_MARKERS = ("8", "H", "s", "D", "^")

#: Dashes of the infinite-cache bounds, by the kind of lookup of an arm.
BOUND_LINES: dict[str, Any] = {"prefixes": (0, (1, 1.5)), "spans anywhere": (0, (4, 2))}

CAUSE_COLOURS = {
    "reused": "#117733",
    "never_seen": "#dddddd",
    "out_of_reach": "#66ccbb",
    "never_stored": "#aaaaaa",
    "kv_evicted": "#332288",
    "state_evicted": "#88ccee",
    "state_never_placed": "#ddcc77",
    "alignment": "#cc6677",
    "last_token": "#222222",
    "locked": "#aa4499",
    "repair": "#999933",
}


@dataclass(frozen=True)
class Stroke:
    """Style of the line of one arm."""

    colour: str
    marker: str
    line: Any

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Axes.plot` for a line with markers."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


FOOTER_LINES = 2  # lines that fit into the bottom margin; a longer footer makes the figure taller


@dataclass(frozen=True)
class Margins:
    """Margins around the axes in inches, which include title and footer."""

    left: float = 0.8
    right: float = 0.25
    top: float = 0.5
    bottom: float = 0.9


def family_style(family: str) -> tuple[str, str]:
    """Return colour and marker of a family; unlisted families get a stable pair derived from the
    name."""
    listed = FAMILY_STYLES.get(family)
    if listed:
        return listed
    number = zlib.crc32(family.encode())
    return _SPARE_COLOURS[number % len(_SPARE_COLOURS)], _SPARE_MARKERS[
        number // 7 % len(_SPARE_MARKERS)
    ]


def strokes(arms: Iterable[tuple[str, str]]) -> dict[str, Stroke]:
    """One stroke per arm of (name, family); arms of one family share the colour and differ in the
    dashes."""
    # lines of kv_only often cover those of `none`, and radix those of block_hash; dashes show both
    used = Counter({"kv_only": 1, "radix": 1})
    chosen: dict[str, Stroke] = {}
    for name, family in arms:
        colour, marker = family_style(family)
        chosen[name] = Stroke(colour, marker, LINE_STYLES[used[family] % len(LINE_STYLES)])
        used[family] += 1
    return chosen


def framed_with(
    footer: str,
    title: str,
    rows: int = 1,
    cols: int = 1,
    *,
    height: float = HEIGHT_IN,
    margins: Margins = Margins(),
    share: tuple[Share, Share] = ("none", "none"),
    **grid: Any,
) -> tuple[Figure, list[list[Axes]]]:
    """A titled figure with `rows` x `cols` plain axes over a footer; `share` is (sharex,
    sharey)."""
    from matplotlib.figure import Figure

    extra = max(0, wrapped(footer).count("\n") + 1 - FOOTER_LINES) * 1.3 * NOTE_PT / 72  # inches
    height += extra
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI)
    grid |= {
        "left": margins.left / WIDTH_IN,
        "right": 1 - margins.right / WIDTH_IN,
        "top": 1 - margins.top / height,
        "bottom": (margins.bottom + extra) / height,
    }
    axes = figure.subplots(
        rows, cols, squeeze=False, sharex=share[0], sharey=share[1], gridspec_kw=grid
    ).tolist()
    for ax in (ax for row in axes for ax in row):
        plain(ax)
    add_title(figure, title)
    add_footer(figure, footer)
    return figure, axes


def panels(
    footer: str, title: str, number: int, cols: int, heights: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `number` panels, filled by row; `heights` in inches: of the margins, and of
    each row.

    Other options are those of `framed_with`.
    """
    rows = -(-number // cols)
    figure, axes = framed_with(
        footer, title, rows, cols, height=heights[0] + heights[1] * rows, **options
    )
    flat = [ax for row in axes for ax in row]
    for ax in flat[number:]:
        ax.set_axis_off()
    return figure, flat[:number]


def add_title(figure: Figure, title: str) -> None:
    """Draw the title in bold at the top, with a smaller font for a long title."""
    size = min(11.0, 11.0 * 88 / len(title))
    top = 1 - 0.12 / figure.get_figheight()
    figure.text(0.12 / WIDTH_IN, top, title, va="top", fontsize=size, fontweight="bold", color=INK)


def add_footer(figure: Figure, line: str) -> None:
    """Draw the provenance line in a small font at the bottom, wrapped to the figure's width."""
    height = figure.get_figheight()
    figure.text(
        0.12 / WIDTH_IN,
        0.08 / height,
        wrapped(line),
        va="bottom",
        fontsize=NOTE_PT,
        color="#555555",
    )


def wrapped(line: str) -> str:
    """Wrap the footer to the figure's width."""
    return textwrap.fill(line, width=142, break_long_words=True)


def plain(ax: Axes) -> None:
    """Apply the common style of axes: thin grid, no box, legible ticks."""
    ax.grid(True, color=FAINT, linewidth=0.5)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=TICK_PT, color="#999999", labelcolor=INK, length=3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#999999")


def label(ax: Axes, x: str = "", y: str = "", size: float = LABEL_PT) -> None:
    """Name both axes, units included."""
    ax.set_xlabel(x, fontsize=size, color=INK)
    ax.set_ylabel(y, fontsize=size, color=INK)


def margins_for(names: Iterable[str]) -> Margins:
    """Return margins with space for a legend of `names` on the right."""
    return Margins(right=min(0.75 + 0.072 * max(map(len, names), default=0), WIDTH_IN / 2))


def legend_right(ax: Axes, **options: Any) -> None:
    """Draw a legend outside of the axes, in the right margin."""
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), fontsize=8.5, frameon=False, **options)


# ------------------------------------------------------------------------------
# Placement of short labels beside points, without overlaps.
# ------------------------------------------------------------------------------

_LABEL_PT = 7.5
_PIXELS_PER_PT = DPI / 72
_POINT_PX = 4.0 * _PIXELS_PER_PT
_SAMPLE_PX = 5.0
# Candidate positions of a label around its point, best first: (horizontal, vertical) steps, then
# wider gaps.
_AROUND = ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
_RINGS = (1.0, 2.8, 5.0)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Label:
    """A text to be placed near the point (x, y) in data coordinates."""

    x: float
    y: float
    text: str
    colour: str


def place_labels(
    ax: Axes, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]] = ()
) -> None:
    """Place each label near its point and off all points, and off `lines` where there is room.

    A label without a free position is omitted. The limits and the position of `ax` must be final.
    """
    if not labels:
        return
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    points = ax.transData.transform([(label.x, label.y) for label in labels])
    sampled = [points]  # and points of the lines, every few pixels
    for line in lines:
        corners = ax.transData.transform(line)
        steps = np.hypot(*np.diff(corners, axis=0).T)
        pieces = zip(corners[:-1], corners[1:], steps, strict=True)
        sampled += [
            np.linspace(start, stop, 2 + int(step / _SAMPLE_PX)) for start, stop, step in pieces
        ]
        sampled.append(corners)
    covered, occupied = np.concatenate(sampled), np.empty((0, 4))
    leaders, colours = [], []
    frame, to_axes = np.asarray(ax.bbox.extents), ax.transAxes.inverted()
    for k in np.argsort(points[:, 0], kind="stable"):
        size = np.array([0.62 * len(labels[k].text), 1.05]) * _LABEL_PT * _PIXELS_PER_PT
        candidates = []
        for ring, side in product(_RINGS, _AROUND):
            centre = points[k] + np.array(side) * (size / 2 + ring * _POINT_PX)
            box = np.concatenate([centre - size / 2, centre + size / 2])
            if (box[:2] >= frame[:2]).all() and (box[2:] <= frame[2:]).all():
                candidates.append(box)
        free = _free(candidates, covered, occupied)
        free = _free(candidates, points, occupied) if free is None else free
        if free is None or not labels[k].text:
            continue
        occupied = np.vstack([occupied, free])
        # thin letters look paler than the marker of the same colour
        darker = tuple(0.7 * channel for channel in to_rgb(labels[k].colour))
        x, y = to_axes.transform((free[:2] + free[2:]) / 2)
        centred: dict[str, Any] = {"ha": "center", "va": "center", "transform": ax.transAxes}
        ax.text(x, y, labels[k].text, fontsize=_LABEL_PT, color=darker, **centred)
        near = np.clip(points[k], free[:2], free[2:])
        if np.hypot(*(near - points[k])) > 2 * _POINT_PX:
            leaders.append(to_axes.transform([points[k], near]))
            colours.append(darker)
    ax.add_collection(
        LineCollection(leaders, colors=colours, linewidths=0.5, transform=ax.transAxes, zorder=2.5),
        False,
    )


def _free(boxes: Sequence[Floats], points: Floats, occupied: Floats) -> Floats | None:
    for box in boxes:
        covers = ((points > box[:2] - 0.6 * _POINT_PX) & (points < box[2:] + 0.6 * _POINT_PX)).all(
            axis=1
        )
        overlaps = ((box[:2] < occupied[:, 2:]) & (box[2:] > occupied[:, :2])).all(axis=1)
        if not covers.any() and not overlaps.any():
            return box
    return None


# ------------------------------------------------------------------------------
# Scales, ticks and units of axes.
# ------------------------------------------------------------------------------


def log_scale(axis: Axis, low: float, high: float) -> None:
    """Set a log axis with plain numbers (0.2, 5, 1000) instead of powers, and fewer ticks over many
    decades."""
    from matplotlib.axis import XAxis
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{"xscale" if isinstance(axis, XAxis) else "yscale": "log"})
    decades = high / low
    axis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if decades < 300 else (1, 3) if decades < 3e4 else (1,))
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(plain_number))


def plain_number(value: float, _position: int = 0) -> str:
    """0.05, 3, 20k, 1.5M: short enough for a tick."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def count_ticks(axis: Axis) -> None:
    """Linear ticks as short counts (2000, 20k, 1.5M)."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(plain_number))


@dataclass(frozen=True)
class Unit:
    """A unit for an axis: multiply seconds, or bytes, by `factor`."""

    name: str
    factor: float


def time_unit(largest_s: float) -> Unit:
    """Return the time unit for an axis with this largest value."""
    if largest_s < 1.0:
        return Unit("ms", 1e3)
    if largest_s < 3 * 3600:
        return Unit("s", 1.0)
    return Unit("h", 1 / 3600)


def byte_unit(largest: float) -> Unit:
    """Return the byte unit for an axis with this largest value."""
    name, size = next(
        (unit for unit in (("GiB", 2**30), ("MiB", 2**20)) if largest >= unit[1]), ("KiB", 2**10)
    )
    return Unit(name, 1 / size)


def positive_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the smallest and largest positive value, or (0.1, 1) where no value is positive."""
    positive = values[values > 0]
    if not len(positive):
        return 0.1, 1.0
    return float(positive.min()), float(positive.max())


def empirical_cdf(
    values: NDArray[np.float64], steps: int = 400
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Values and the percentage of the sample at or below each, thinned to at most `steps`
    steps."""
    ordered = np.sort(values)
    rank = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), steps)).round().astype(int))
    percent = 100.0 * (rank + 1) / len(ordered)
    return np.concatenate([ordered[:1], ordered[rank]]), np.concatenate([[0.0], percent])


# ------------------------------------------------------------------------------
# Write figures as PNG for reading and PDF for print, with the same bytes for the same study.
# ------------------------------------------------------------------------------

_NOT_STYLE = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")


def write_figure(draw: Callable[[], Figure | None], stem: Path) -> list[Path]:
    """Draw one figure to `stem`.png and .pdf; nothing is written where `draw` returns None."""
    from matplotlib import rc_context, rcParamsDefault
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    # a user's matplotlibrc would change the bytes
    with rc_context(
        {key: value for key, value in rcParamsDefault.items() if key not in _NOT_STYLE}
    ):
        figure = draw()
        if figure is None:
            return []
        stem.parent.mkdir(parents=True, exist_ok=True)
        png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
        # the methods of the canvases draw once per format; Figure.savefig draws twice. PNG first:
        # PDF sets the figure's dpi
        with _replacing(png) as temporary:
            FigureCanvasAgg(figure).print_png(
                temporary, metadata={"Software": None}, pil_kwargs={"compress_level": 4}
            )
        with _replacing(pdf) as temporary:
            FigureCanvasPdf(figure).print_pdf(temporary, metadata={"CreationDate": None})
    return [png, pdf]


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
