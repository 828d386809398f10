"""A long footer makes a figure taller and does not overlap its axes."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from spanlab.report.style import framed_with


@pytest.mark.parametrize("count", [1, 40, 90, 160])
def test_footer_does_not_touch_the_axis_title(count):
    figure, ((ax,),) = framed_with("measured " * count, "title")
    ax.set_xlabel("share of prompt tokens (%)")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    footer = figure.texts[-1].get_window_extent(renderer)
    assert ax.xaxis.label.get_window_extent(renderer).y0 >= footer.y1
