"""Figures say what they show, in which unit, of which run."""

from __future__ import annotations

import numpy as np
import pytest

from spanlab.checkpoint_bench import figures
from spanlab.checkpoint_bench.figures import FIGURES
from spanlab.checkpoint_bench.run import footer
from spanlab.report.data import StudyData

UNITS = {
    "prefill": ("prefill time (", "cached tokens"),
    "capture": ("capture overhead (% of the cold prefill)", "states captured"),
    "bytes": ("(MiB)", "states kept"),
    "speedup": ("speedup of prefill (×)", "prompt length (tokens)"),
}


@pytest.fixture(scope="module")
def summary(folder, read):
    """The run's, and the same at twice the length."""
    small = read(folder)[1]
    keys = ("captures", "again", "noise", "curves")
    twice = {key: [_doubled(entry) for entry in small[key]] for key in keys}
    return small | {key: [*small[key], *twice[key]] for key in keys}


def _doubled(entry):
    return entry | {key: 2 * entry[key] for key in ("length", "shared") if key in entry}


@pytest.fixture(scope="module")
def drawn(summary):
    study = StudyData("tiny-hybrid: one sequence", footer(summary), [], [], "")
    return {name: draw(study, summary) for name, draw in FIGURES.items()}


def texts(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_its_run_and_its_units(name, drawn, summary):
    said = texts(drawn[name])
    assert footer(summary) in said.replace("\n", " ")
    assert all(words in said for words in UNITS[name])


def test_arms_are_named_where_they_are_told_apart(drawn, settings):
    for arm in settings().arms:
        if arm != "none":
            assert arm in texts(drawn["capture"])
            assert arm in texts(drawn["speedup"])


def test_measured_prefills_stand_over_the_position_that_they_started_from(drawn, summary):
    points = np.concatenate([line.get_xydata() for line in drawn["prefill"].axes[0].lines if line.get_marker() == "o"])
    assert set(points[:, 0]) == {entry["resume"] for entry in summary["again"]} | {0}
    factor = 1e3 if "(ms)" in texts(drawn["prefill"]) else 1.0
    measured = [entry["ttft_s"]["p50"] for entry in summary["again"]] + [e["bare_s"]["p50"] for e in summary["noise"]]
    assert sorted(points[:, 1]) == pytest.approx(sorted(factor * one for one in measured))


def test_bytes_lie_on_the_line_of_the_models_sizes(drawn):
    lines = drawn["bytes"].axes[0].lines
    theory, dots = lines[0], lines[1]
    assert dots.get_marker() == "o"
    assert np.interp(dots.get_xdata(), *theory.get_data()) == pytest.approx(dots.get_ydata())


def test_speedups_stand_beside_their_bounds(drawn, summary):
    ax = next(ax for ax in drawn["speedup"].axes if ax.get_title(loc="left") == "dp_1")
    own = [entry for entry in summary["again"] if entry["arm"] == "dp_1" and 2 * entry["shared"] == entry["length"]]
    _, bound, measured = ax.lines[:3]
    assert list(bound.get_ydata()) == [entry["bound_speedup"] for entry in own]
    assert list(measured.get_ydata()) == [entry["speedup"]["p50"] for entry in own]


def test_every_model_gets_its_own_files_and_no_slash_in_them(summary, tmp_path):
    keys = ("captures", "again", "noise", "goal", "curves")
    two = summary | {key: [entry | {"model": name} for name in ("a", "b/c") for entry in summary[key]] for key in keys}
    written = figures.write(two, "title", footer(summary), tmp_path)
    assert sorted(path.name for path in written) == sorted(
        f"{name}_{model}.{kind}" for name in FIGURES for model in ("a", "b_c") for kind in ("png", "pdf")
    )


def test_without_anything_that_keeps_there_is_still_the_cold_prefill(summary, tmp_path):
    bare = summary | {"captures": [], "again": []}
    written = figures.write(bare, "title", footer(summary), tmp_path)
    assert {path.stem for path in written} == {"prefill_tiny-hybrid"}
