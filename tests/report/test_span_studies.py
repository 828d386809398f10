"""Studies with prefix lookup and with lookup of spans anywhere: bounds, table and figures separate both."""

from dataclasses import replace

import pytest

from spanlab.analyses.summary import arms_table
from spanlab.report.curves import FIGURES
from spanlab.report.data import bounds_percent, resident_bytes
from spanlab.report.table import as_text as texts


@pytest.fixture(scope="module")
def study(studies):
    """Four arms; the last two look up spans anywhere, and the last one repairs some tokens."""
    built = studies.make_study({name: studies.ARMS[name] for name in ("none", "radix", "branch", "last_528")}, 2, 60)
    pic, blend = built.arms[2:]
    seen_tokens = pic.summary["tokens"]["seen"]
    pic.summary.update(finds="spans anywhere", own_bound_tokens=seen_tokens + 500)
    blend.summary.update(finds="spans anywhere", own_bound_tokens=seen_tokens + 400)
    blend.summary["bytes"].update(copied_mean=2 * 2**30, kv_resident_mean=5 * 2**30, state_resident_mean=0.0)
    blend.summary["tokens"]["repaired"] = blend.summary["tokens"]["prompt"] // 8
    return replace(built, caveats=("quality is unknown here",), baseline="none")


def as_text(study, width=160):
    return texts([arms_table(study)], width)


def single_spaced(text: str) -> str:
    return " ".join(text.split())


def test_each_kind_of_lookup_has_its_largest_bound(study):
    prompt, seen_tokens = (study.arms[0].summary["tokens"][key] for key in ("prompt", "seen"))
    expected = {"prefixes": 100 * seen_tokens / prompt, "spans anywhere": 100 * (seen_tokens + 500) / prompt}
    assert bounds_percent(arm.summary for arm in study.arms) == pytest.approx(expected)
    lines = {line.get_label(): line.get_ydata()[0] for line in FIGURES["pareto_tokens"](study).axes[0].lines}
    for finds, percent in expected.items():
        assert lines[f"infinite cache:\n{finds}"] == pytest.approx(percent)


def test_a_column_of_repairs_only_where_something_repairs(study, full):
    assert "repaired" not in as_text(full, 400)
    text = as_text(study, 400)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "12.5 %" in rows["last_528"]
    assert "12.5 %" not in rows["branch"]
    assert "repaired tokens = computed by a repair" in single_spaced(text)


def test_private_copies_count_as_resident_bytes(study, full):
    rows = {line.split()[0]: line for line in as_text(study, 400).splitlines() if line.strip()}
    assert "7.00 GiB" in rows["last_528"]
    assert resident_bytes(study.arms[3]) == 7 * 2**30
    assert "private copies of running requests" in single_spaced(as_text(study))
    assert "copied" not in as_text(full)


def test_a_caveat_appears_once_and_only_in_its_study(study, full):
    assert single_spaced(as_text(study)).count("quality is unknown here") == 1
    assert "quality" not in as_text(full).replace("quality_sim", "")


def test_the_bound_is_explained_by_what_is_compared(study, full):
    assert "could reuse, wherever their spans stand;" in single_spaced(as_text(study))
    assert "could reuse; request hit rate" in single_spaced(as_text(full))


def test_notes_name_the_baseline_and_the_hit_of_the_study(full):
    text = single_spaced(as_text(replace(full, baseline="no_cache", count_hit_as="matched")))
    assert "speedup = mean TTFT of no_cache ÷" in text
    assert "at least one matched token" in text


def test_common_prefixes_are_read_from_an_arm_that_looks_for_them(study):
    import numpy as np

    prefixes = study.arms[1].columns["seen_tokens"]
    figure = FIGURES["common_prefix"](replace(study, arms=study.arms[1:]))
    assert figure.axes[0].patches[0].get_data().values.sum() == len(prefixes)
    assert FIGURES["common_prefix"](replace(study, arms=study.arms[2:])) is None
    assert np.asarray(prefixes).max() > 0


def test_states_are_named_where_an_arm_holds_some(study, studies):
    stateless = studies.make_study({"none": studies.ARMS["none"], "kv_only": studies.ARMS["kv_only"]}, 2, 40)
    assert FIGURES["pareto_tokens"](stateless).axes[0].get_xlabel() == "resident bytes, KV, mean over time (MiB)"
    assert "KV + states" in FIGURES["pareto_ttft"](study).axes[0].get_xlabel()
    assert [text.get_text() for text in FIGURES["cache_content"](stateless).legends[0].get_texts()] == ["KV"]


def test_ttft_over_load_is_that_of_the_load_points(study):
    mean, *_ = FIGURES["ttft_load"](study).axes
    points = [point for point in study.load if point.arm == "radix"]
    lines = {line.get_label(): line for line in mean.lines}
    assert lines["radix"].get_ydata().tolist() == pytest.approx([point.ttft_s["mean"] for point in points])
    assert "zeros" not in mean.get_title("left")
    assert mean.get_ylabel().startswith("TTFT (")
