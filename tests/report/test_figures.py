"""Every figure is drawn for every study, with units and with the numbers of the summary."""

import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from spanlab.records import LOSS_CAUSES
from spanlab.report import style
from spanlab.report.curves import FIGURES, Point, frontier
from spanlab.report.data import half_width, holds_states
from spanlab.report.figures import best_of_families, binned_quartiles, reference
from spanlab.report.style import byte_unit, empirical_cdf, framed_with, plain_number

from ..support.figures import check_fits

UNIT = re.compile(
    r"\((s|ms|h|KiB|MiB|GiB|tokens|%|% of prompt tokens|requests/s|of \d+|number|reused, %)\)|requests \(of \d+\)|\(%\)"
)


@pytest.fixture(scope="module")
def drawn(full):
    return {name: FIGURES[name](full) for name in FIGURES}


def series(figure, gid):
    """Return the line with this `gid`."""
    return next(line for ax in figure.axes for line in ax.lines if line.get_gid() == gid)


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_figure_draws_on_degenerate_studies_without_warnings(degenerate, name):
    """On the canvas of PNG; both files of every figure: tests/report/test_write.py."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for study in degenerate.values():
            if (figure := FIGURES[name](study)) is not None:
                FigureCanvasAgg(figure).draw()


def test_a_study_without_the_data_has_no_such_figure(degenerate):
    assert all(FIGURES[name](degenerate["no arms"]) is None for name in FIGURES)
    zero_states = degenerate["zero states"]
    assert FIGURES["checkpoint_positions"](zero_states) is None
    assert FIGURES["queueing_load"](degenerate["one arm, one seed"]) is None
    assert FIGURES["cache_content"](degenerate["zero bytes, no hits"]) is None
    assert FIGURES["pareto_ttft"](degenerate["zero bytes, no hits"]) is None


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_figure_has_its_footer(drawn, full, name):
    texts = [" ".join(text.get_text().split()) for text in drawn[name].texts]
    assert f"{full.title} · {full.footer}" in texts


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_axis_label_carries_its_unit(drawn, name):
    figure = drawn[name]
    labels = [getattr(ax, f"get_{axis}label")() for ax in figure.axes for axis in "xy"]
    labels = [label for label in [*labels, figure.get_supxlabel(), figure.get_supylabel()] if label]
    assert len(labels) >= 2
    assert [label for label in labels if not UNIT.search(label)] == []


@pytest.mark.parametrize("name", list(FIGURES))
def test_nothing_is_cut_at_the_edge(drawn, name):
    drawn[name].set_dpi(style.DPI)
    check_fits(drawn[name])


def test_pareto_points_are_the_summaries_numbers(drawn, full):
    for family in {arm.family for arm in full.arms} - {"none"}:
        arms = [arm for arm in full.arms if arm.family == family]  # in the order of the study, so of the parameter
        gib = [
            (arm.summary["bytes"]["kv_resident_mean"] + arm.summary["bytes"]["state_resident_mean"]) / 2**30
            for arm in arms
        ]
        for name, y in (
            ("pareto_tokens", [100 * arm.summary["token_hit_rate"] for arm in arms]),
            ("pareto_ttft", [arm.summary["ttft_s"]["mean"] for arm in arms]),
        ):
            line = series(drawn[name], f"family:{family}")
            assert line.get_xdata().tolist() == gib
            assert line.get_ydata().tolist() == y


def test_infinite_cache_bound_is_seen_over_prompt(drawn, full):
    tokens = full.arms[0].summary["tokens"]
    line = next(line for line in drawn["pareto_tokens"].axes[0].lines if line.get_label() == "infinite cache")
    assert set(line.get_ydata()) == {100 * tokens["seen"] / tokens["prompt"]}


def test_arms_without_bytes_are_named_beside_the_pareto(drawn):
    notes = [text.get_text() for text in drawn["pareto_tokens"].axes[0].texts]
    assert "not drawn:\nnone (0 bytes)" in notes


def test_loss_bars_of_every_arm_sum_to_100(drawn, full):
    (ax,) = drawn["loss_by_cause"].axes
    ends = {}
    for container in ax.containers:
        for bar in container:
            row = round(bar.get_y() + bar.get_height() / 2)
            assert bar.get_x() == pytest.approx(ends.get(row, 0.0))
            ends[row] = bar.get_x() + bar.get_width()
    assert len(ax.containers) == 1 + len(LOSS_CAUSES)
    assert sorted(ends) == list(range(len(full.arms)))
    assert list(ends.values()) == pytest.approx([100.0] * len(full.arms))


def test_loss_bars_rise_with_the_reused_share(drawn):
    widths = [bar.get_width() for bar in drawn["loss_by_cause"].axes[0].containers[0]]
    assert widths == sorted(widths)


def test_a_family_has_one_colour_in_all_figures(drawn, full):
    family = {arm.name: arm.family for arm in full.arms} | {arm.family: arm.family for arm in full.arms}
    for name in ("pareto_tokens", "pareto_ttft", "length_ttft", "ttft_distribution", "queueing_load"):
        lines = [line for ax in drawn[name].axes for line in ax.lines if line.get_label() in family]
        assert lines, name
        for line in lines:
            assert to_hex(line.get_color()) == style.family_style(family[line.get_label()])[0]


def test_families_differ_in_colour_and_in_marker():
    """Colours differ among all families; markers among families that share figures, with states or with spans."""
    *families, alone, always, break_even = (
        style.FAMILY_STYLES
    )  # the last three, of tiers, share no figure with the others
    assert len({style.FAMILY_STYLES[family][0] for family in families}) == len(families)
    assert len({style.FAMILY_STYLES[family] for family in (alone, always, break_even)}) == 3
    spans = families[families.index("pic") :]
    for together in (families[:15], [*families[:5], *spans]):
        assert len({style.FAMILY_STYLES[family][1] for family in together}) == len(together)


def test_an_unknown_family_has_a_stable_style():
    assert style.family_style("tail_first") == style.family_style("tail_first")
    assert style.family_style("tail_first") == ("#66a61e", "D")


def test_arms_of_one_family_differ_in_dashes():
    chosen = style.strokes([("dp_3", "dp"), ("radix", "radix"), ("dp_30", "dp")])
    assert chosen["dp_3"].colour == chosen["dp_30"].colour
    assert chosen["dp_3"].line != chosen["dp_30"].line


def test_every_cause_has_its_colour():
    assert {"reused", *LOSS_CAUSES} <= style.CAUSE_COLOURS.keys()
    assert len(set(style.CAUSE_COLOURS.values())) == len(style.CAUSE_COLOURS)


def test_checkpoint_dots_are_the_stored_states(drawn, full):
    figure = drawn["checkpoint_positions"]
    arms = best_of_families((arm for arm in full.arms if holds_states(arm)), 8)
    assert [ax.get_title("left") for ax in figure.axes] == [arm.name for arm in arms]
    for ax, arm in zip(figure.axes, arms, strict=True):
        rounds = arm.runs[0]["group_rounds"]
        stored = [(p, visit["round"]) for visit in rounds for p in visit["positions"]]
        dots = ax.lines[0]
        assert list(zip(dots.get_xdata(), dots.get_ydata(), strict=True)) == stored
        prompt, match = (collection.get_segments() for collection in ax.collections[:2])
        assert [segment[1][0] for segment in prompt] == [visit["prompt"] for visit in rounds]
        assert [segment[1][0] for segment in match] == [visit["match"] for visit in rounds]


def test_queueing_delays_are_the_load_points(drawn, full):
    mean, tail, busy, _ = drawn["queueing_load"].axes
    points = [point for point in full.load if point.arm == "dp_3"]
    lines = {line.get_label(): line for line in mean.lines}
    expected = [point.queue_s["mean"] or np.nan for point in points]
    np.testing.assert_array_equal(lines["dp_3"].get_ydata(), expected)
    assert lines["dp_3"].get_xdata().tolist() == [point.rate_rps for point in points]
    k = list(lines).index("dp_3")
    np.testing.assert_array_equal(tail.lines[k].get_ydata(), [point.queue_s["p99"] or np.nan for point in points])
    assert busy.lines[k].get_ydata().tolist() == [100 * point.utilisation for point in points]


def test_common_prefix_counts_every_request(drawn, full):
    for ax in drawn["common_prefix"].axes[:2]:
        (stairs,) = ax.patches
        assert stairs.get_data().values.sum() == len(full.arms[0].columns["seen_tokens"])


def test_labels_do_not_overlap(drawn):
    for name in ("pareto_tokens", "pareto_ttft"):
        figure = drawn[name]
        figure.set_dpi(style.DPI)
        renderer = FigureCanvasAgg(figure).get_renderer()
        boxes = [text.get_window_extent(renderer) for text in figure.axes[0].texts]
        pairs = [(a, b) for k, a in enumerate(boxes) for b in boxes[:k]]
        assert not any(a.overlaps(b) for a, b in pairs)


def test_frontier_has_the_undominated_arms():
    def point(name, x, y, saves=True):
        return Point(name, "dp", x, y, 0.0, (0.0, 0.0), saves)

    points = [point("cheap", 1, 10), point("worse", 2, 9), point("better", 3, 20), point("idle", 0, 0, saves=False)]
    assert [member.name for member in frontier(points, larger_is_better=True)] == ["cheap", "better"]
    assert [member.name for member in frontier(points, larger_is_better=False)] == ["cheap", "worse"]


def test_representatives_are_references_and_the_best_of_each_family(full):
    chosen = [arm.name for arm in best_of_families(full.arms, 6)]
    assert chosen == ["none", "kv_only", "oracle_1", "boundary", "mixed_branch_dp_3", "branch"]
    assert reference(full.arms).name == "none"
    assert reference(full.arms[1:]) is None


def test_bins_hold_equal_counts():
    length, value = np.arange(12), np.arange(12.0) * 10
    middle, (lower, median, upper) = binned_quartiles(length, value, bins=3)
    assert middle.tolist() == [1.5, 5.5, 9.5]
    assert median.tolist() == [15.0, 55.0, 95.0]
    assert lower.tolist() == [7.5, 47.5, 87.5]
    assert upper.tolist() == [22.5, 62.5, 102.5]


def test_empirical_cdf_ends_at_100_percent():
    x, percent = empirical_cdf(np.array([3.0, 1.0, 2.0, 2.0]))
    assert x.tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert percent.tolist() == [0.0, 25.0, 50.0, 75.0, 100.0]
    thin_x, thin_percent = empirical_cdf(np.arange(10_000.0), steps=100)
    assert (len(thin_x), thin_x[-1], thin_percent[-1]) == (101, 9999.0, 100.0)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.05, "0.05"), (2000, "2000"), (20_000, "20k"), (1.5e6, "1.5M")]
)
def test_ticks_are_plain_numbers(value, text):
    assert plain_number(value) == text


@pytest.mark.parametrize(("largest", "name"), [(0, "KiB"), (2**20, "MiB"), (2**30 - 1, "MiB"), (2**30, "GiB")])
def test_bytes_have_the_unit_of_the_largest(largest, name):
    unit = byte_unit(largest)
    assert unit.name == name
    assert {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[name] * unit.factor == 1


def test_half_width_is_students():
    assert half_width(np.array([5.0])) == 0.0
    assert half_width(np.array([1.0, 2.0, 3.0])) == pytest.approx(4.30265273 / 3**0.5)


def test_unknown_figure_lists_the_known_ones():
    with pytest.raises(ValueError, match="figure=pie: expected one of pareto_tokens"):
        FIGURES["pie"]


def test_arms_of_a_load_figure_keep_their_order(full):
    names = list(dict.fromkeys(point.arm for point in full.load))
    figure = FIGURES["queueing_load"](full)
    assert [text.get_text() for text in figure.axes[3].get_legend().get_texts()] == names
    assert names == ["none", "radix", "dp_3", "dp_30"]


def test_unstable_loads_are_hollow_and_off_the_lines(full):
    points = [point for point in full.load if point.arm in ("none", "radix")]
    last = max((point for point in points if point.arm == "none"), key=lambda point: point.rate_rps)
    grown = {"mean": None, "low": None, "high": None, "p99": None, "unstable": 21.0}
    state = replace(last.state, verdict="saturated")
    marked = [replace(p, state=state, ttft_s=grown) if p is last else p for p in points]
    mean, tail, _, _ = FIGURES["ttft_load"](replace(full, load=marked)).axes
    lines = {line.get_label(): line for line in mean.lines}
    assert np.isnan(lines["none"].get_ydata()[-1])
    (hollow,) = (line for line in mean.lines if line.get_gid() == "unstable")
    assert hollow.get_xdata().tolist() == [last.rate_rps]
    assert hollow.get_markerfacecolor() == "none"
    assert not [line for line in tail.lines if line.get_gid() == "unstable"]
    assert "hollow: no steady state" in mean.get_title("left")


def test_fewer_than_five_seeds_draw_no_band(full):
    bandless = [replace(point, seeds=3, ttft_s=point.ttft_s | {"low": None, "high": None}) for point in full.load]
    mean = FIGURES["ttft_load"](replace(full, load=bandless)).axes[0]
    assert "no band: under 5 seeds" in mean.get_title("left")
    assert all(len(path.vertices) == 0 for band in mean.collections for path in band.get_paths())


def test_no_pareto_of_a_store_that_is_full_for_all(full):
    filled = replace(full, arms=[replace(arm, summary=arm.summary | {"evicted_bytes": 1}) for arm in full.arms])
    assert FIGURES["pareto_tokens"](filled) is FIGURES["pareto_ttft"](filled) is None


def test_full_stores_are_not_on_the_frontier():
    small = Point("small", "dp", 1, 10, 0.0, (0.0, 0.0), True)
    full = Point("full", "dp", 2, 20, 0.0, (0.0, 0.0), True, full=True)
    assert frontier([small, full], larger_is_better=True) == [small]


# -- A long footer makes a figure taller and does not overlap its axes. ---


@pytest.mark.parametrize("count", [1, 40, 90, 160])
def test_footer_does_not_touch_the_axis_title(count):
    figure, ((ax,),) = framed_with("measured " * count, "title")
    ax.set_xlabel("share of prompt tokens (%)")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    footer = figure.texts[-1].get_window_extent(renderer)
    assert ax.xaxis.label.get_window_extent(renderer).y0 >= footer.y1
