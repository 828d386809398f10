"""Figures say what they show, in which unit, of which run."""

from __future__ import annotations

import pytest

from spanlab.pic_bench.figures import FIGURES, write
from spanlab.pic_bench.figures.curves import curves
from spanlab.report.data import StudyData

FOOTER = "random weights, float32 · builtin tokenizer · cpu, 1 threads · commit 0"


@pytest.fixture(scope="module")
def entries(folder, read):
    small = read(folder)[1]["entries"]
    large = [entry | {"size": "sm", "prompt_tokens": 5 * entry["prompt_tokens"]} for entry in small]
    return [*small, *large]


@pytest.fixture(scope="module")
def drawn(entries):
    study = StudyData("tiny: 4 documents", FOOTER, [], [], "")
    return {name: draw(study, entries) for name, draw in FIGURES.items()}


def texts(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_its_run_its_arms_and_its_units(name, drawn, entries):
    said = texts(drawn[name])
    assert FOOTER in said.replace("\n", " ")
    assert "tiny: 4 documents" in said
    for arm in ("pic", "pic_raw", "cache_blend_15", "ape"):
        assert arm in said
    assert any(unit in said for unit in ("(ms)", "(s)", "(×)"))


def test_the_same_order_is_a_curve_of_its_own_and_sizes_go_up(entries):
    found = curves(list(reversed(entries)))
    assert {"radix", "radix, same order", "pic", "none"} <= found.keys()
    assert all([entry["size"] for entry in own] == ["xs", "sm"] for own in found.values())


def test_speedups_stand_beside_their_bounds(drawn, entries):
    own = curves(entries)["pic"]
    ax = next(ax for ax in drawn["speedup"].axes if ax.get_title(loc="left") == "pic")
    bound, measured = ax.lines[:2]
    assert list(bound.get_ydata()) == [entry["bound_speedup"] for entry in own]
    assert list(measured.get_ydata()) == [entry["speedup"]["p50"] for entry in own]


def test_bars_are_as_long_as_the_parts_of_the_time(drawn, entries):
    ax = drawn["parts"].axes[0]
    largest = [entry for entry in entries if entry["size"] == "sm" and entry["token_hit_rate"] >= 0.5]
    factor = 1e3 if "(ms)" in ax.get_xlabel() else 1.0
    ends = [max(bar.get_x() + bar.get_width() for bar in bars) for bars in zip(*ax.containers, strict=True)]
    assert ends == pytest.approx([factor * sum(entry["parts_s"].values()) for entry in largest])


def test_every_model_gets_its_own_files_and_no_slash_in_them(entries, tmp_path):
    two = [entry | {"model": model} for model in ("a", "b/c") for entry in entries[:12]]
    written = write(two, "title", FOOTER, tmp_path)
    assert sorted(path.name for path in written) == sorted(
        f"{name}_{model}.{kind}" for name in FIGURES for model in ("a", "b_c") for kind in ("png", "pdf")
    )
    assert all(path.stat().st_size > 1000 for path in written)
