"""The common style of all figures: colours of families, frames, units, footer."""

from __future__ import annotations

import textwrap
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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

#: Colour and marker of each family; both differ, so that families stay distinct without colour and in print.
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
    # position-independent methods share figures with the first four only: they are for models without states
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
    """Return colour and marker of a family; unlisted families get a stable pair derived from the name."""
    listed = FAMILY_STYLES.get(family)
    if listed:
        return listed
    number = zlib.crc32(family.encode())
    return _SPARE_COLOURS[number % len(_SPARE_COLOURS)], _SPARE_MARKERS[number // 7 % len(_SPARE_MARKERS)]


def strokes(arms: Iterable[tuple[str, str]]) -> dict[str, Stroke]:
    """One stroke per arm of (name, family); arms of one family share the colour and differ in the dashes."""
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
    """A titled figure with `rows` x `cols` plain axes over a footer; `share` is (sharex, sharey)."""
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
    axes = figure.subplots(rows, cols, squeeze=False, sharex=share[0], sharey=share[1], gridspec_kw=grid).tolist()
    for ax in (ax for row in axes for ax in row):
        plain(ax)
    add_title(figure, title)
    add_footer(figure, footer)
    return figure, axes


def panels(
    footer: str, title: str, number: int, cols: int, heights: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `number` panels, filled by row; `heights` in inches: of the margins, and of each row.

    Other options are those of `framed_with`.
    """
    rows = -(-number // cols)
    figure, axes = framed_with(footer, title, rows, cols, height=heights[0] + heights[1] * rows, **options)
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
    figure.text(0.12 / WIDTH_IN, 0.08 / height, wrapped(line), va="bottom", fontsize=NOTE_PT, color="#555555")


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
