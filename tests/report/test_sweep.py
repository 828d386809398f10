"""The figure of a sweep shows the summaries' numbers, with the bounds of both ways of looking."""

from __future__ import annotations

import warnings
from itertools import pairwise

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from spanlab.report import look
from spanlab.report.sweep import SweptRun, draw_sweep

ARMS = {"none": ("none", "prefixes"), "radix": ("radix", "prefixes"), "pic": ("pic", "spans anywhere")}


def make_run(value, rates: tuple[float, ...], ttft=(0.05, 0.04, 0.01), half=0.02, bounds=(300, 300, 800)) -> SweptRun:
    """A run of three arms with 1,000 prompt tokens each."""
    arms = {
        name: {
            "family": family,
            "finds": finds,
            "tokens": {"prompt": 1000},
            "own_bound_tokens": bound,
            "token_hit_rate": rate,
            "token_hit_rate_interval": [rate - half, rate + half] if half else None,
            "ttft_s": {"mean": mean},
            "ttft_s_interval": {"mean": [mean - 0.001, mean + 0.001] if half else None},
        }
        for (name, (family, finds)), rate, mean, bound in zip(ARMS.items(), rates, ttft, bounds, strict=True)
    }
    common = {
        "study": "toy",
        "workload": {"name": "rag", "provenance": "modelled"},
        "model": "llama",
        "timing": "roofline",
        "hardware": "h200",
        "store": "16 GiB for KV",
        "seeds": [0, 1, 2] if half else [0],
        "backend": "sim",
        "commit": "1a2b3c4",
    }
    return SweptRun(value, common | {"arms": arms})


WORDS = [make_run("shuffled", (0.0, 0.1, 0.7)), make_run("fixed", (0.0, 0.25, 0.75), bounds=(300, 320, 810))]
NUMBERS = [make_run(4.0, (0.0, 0.1, 0.5), (0.9, 0.5, 0.02)), make_run(64.0, (0.0, 0.2, 0.8), (0.9, 0.4, 0.01))]


def bars(ax) -> dict[str, list[float]]:
    """Heights by arm, values of the setting in order."""
    named = [container for container in ax.containers if container.get_label() in ARMS]
    return {container.get_label(): [round(bar.get_height(), 9) for bar in container] for container in named}


def test_words_are_bars_with_the_summaries_numbers():
    hits, ttft = draw_sweep("workload.rag.order", WORDS).axes
    assert bars(hits) == {"none": [0, 0], "radix": [10, 25], "pic": [70, 75]}
    assert bars(ttft) == {"none": [50, 50], "radix": [40, 40], "pic": [10, 10]}
    assert [label.get_text() for label in ttft.get_xticklabels()] == ["shuffled", "fixed"]
    assert (ttft.get_xlabel(), ttft.get_ylabel()) == ("order of passages", "mean TTFT (ms)")


def test_bars_stand_side_by_side_around_their_value_and_have_their_family_colour():
    hits, _ = draw_sweep("workload.rag.order", WORDS).axes
    rectangles = [bar for container in hits.containers if container.get_label() in ARMS for bar in container]
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in rectangles)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))
    assert {round((low + high) / 2) for low, high in spans} == {0, 1}
    for container in (container for container in hits.containers if container.get_label() in ARMS):
        family = ARMS[container.get_label()][0]
        assert {bar.get_facecolor() for bar in container} == {to_rgba(look.family_look(family)[0])}


def to_rgba(colour: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgba

    return to_rgba(colour)


def test_each_value_has_the_largest_bound_of_each_way_of_looking():
    hits, _ = draw_sweep("workload.rag.order", WORDS).axes
    levels = {
        lines.get_label(): [segment[0][1] for segment in lines.get_segments()]
        for lines in hits.collections
        if lines.get_label().startswith("infinite")
    }
    assert levels == {"infinite cache:\nprefixes": [30, 32], "infinite cache:\nspans anywhere": [80, 81]}


def test_numbers_are_lines_on_an_axis_that_fits_their_range():
    hits, ttft = draw_sweep("store.total_gib", NUMBERS).axes
    lines = {line.get_label(): line for line in hits.lines}
    assert lines["pic"].get_xdata().tolist() == [4, 64]
    assert lines["pic"].get_ydata().tolist() == [50, 80]
    assert lines["infinite cache:\nspans anywhere"].get_ydata().tolist() == [80, 80]
    assert (ttft.get_xscale(), ttft.get_yscale(), hits.get_yscale()) == ("log", "log", "linear")
    assert [tick.get_text() for tick in ttft.get_xticklabels()] == ["4", "64"]
    assert ttft.get_xlabel() == "budget for KV (GiB)"


def test_error_bars_are_the_intervals_over_seeds():
    hits, _ = draw_sweep("workload.rag.order", WORDS).axes
    segments = [lines.get_segments() for lines in hits.collections if not lines.get_label().startswith("infinite")]
    reach = {round(segment[1][1] - segment[0][1], 6) for one in segments for segment in one}
    assert reach == {4.0}


@pytest.mark.parametrize("runs", [WORDS, NUMBERS, [make_run("a", (0, 0, 0), half=0), make_run("b", (0, 0, 0), half=0)]])
def test_it_draws_without_warnings_inside_its_frame(runs, tmp_path):
    figure = draw_sweep("workload.rag.order", runs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FigureCanvasAgg(figure).print_png(tmp_path / "sweep.png")
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_what_the_runs_share_stands_below():
    (footer,) = (text.get_text() for text in draw_sweep("workload.rag.order", WORDS).texts if "toy" in text.get_text())
    assert "toy · rag (modelled) · llama" in footer
    assert "16 GiB for KV · 3 seeds · simulated · commit 1a2b3c4" in " ".join(footer.split())
