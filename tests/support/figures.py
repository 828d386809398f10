"""Requirements of every drawn figure, and facts of every point of a sweep."""

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PROVENANCE: dict[str, Any] = {
    "study": "toy",
    "workload": {"name": "rag", "provenance": "modelled"},
    "model": "llama",
    "timing": "roofline",
    "hardware": "h200",
    "store": "16 GiB for KV",
    "seeds": [0],
    "backend": "sim",
    "commit": "1a2b3c4",
}


def check_fits(figure: Figure) -> None:
    """Draw a figure; all of it is within its edges."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    box, (width, height) = figure.get_tightbbox(renderer), figure.get_size_inches()
    assert (box.x0 >= 0, box.y0 >= 0, box.x1 <= width, box.y1 <= height) == (True,) * 4
