"""Write figures as PNG for reading and PDF for print, with the same bytes for the same study."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOT_STYLE = ("backend", "backend_fallback", "interactive", "toolbar", "timezone")


def write_figure(draw: Callable[[], Figure | None], stem: Path) -> list[Path]:
    """Draw one figure to `stem`.png and .pdf; nothing is written where `draw` returns None."""
    from matplotlib import rc_context, rcParamsDefault

    # a user's matplotlibrc would change the bytes
    with rc_context({key: value for key, value in rcParamsDefault.items() if key not in _NOT_STYLE}):
        figure = draw()
        return _write(figure, stem) if figure else []


def _write(figure: Figure, stem: Path) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    stem.parent.mkdir(parents=True, exist_ok=True)
    png, pdf = stem.with_suffix(".png"), stem.with_suffix(".pdf")
    # the methods of the canvases draw once per format; Figure.savefig draws twice. PNG first: PDF sets the figure's dpi
    with _replacing(png) as temporary:
        FigureCanvasAgg(figure).print_png(temporary, metadata={"Software": None}, pil_kwargs={"compress_level": 4})
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
