"""The table has every arm once, with the summary's numbers, at any width."""

import pytest

from spanlab.analyses.summary import arms_table, load_table, losses_table, study_tables
from spanlab.records import LOSS_CAUSES
from spanlab.report.data import ArmData, StudyData
from spanlab.report.table import as_text as texts
from spanlab.report.table import (
    byte_size_text,
    count_text,
    csv_text,
    percent_text,
    ratio_text,
    seconds_text,
    significant,
)


def as_text(study, width=160):
    return texts([arms_table(study)], width)


def make_arm(name="dp_3", **changes):
    summary = {
        "family": "dp",
        "requests": 200,
        "hits": 150,
        "tokens": {"prompt": 1_000_000, "seen": 800_000, "reused": 631_400, "computed": 368_600, "repaired": 0},
        "finds": "prefixes",
        "bounds": {
            "infinite_prefix_tokens": 801_000,
            "infinite_any_position_tokens": 902_000,
            "offline_tokens": 723_000,
            "regret_points": 9.16,
            "least_ttft_s": 0.3,
            "ttft_regret_s": 0.1125,
        },
        "token_hit_rate": 0.6314,
        "request_hit_rate": 0.75,
        "share_of_bound": 0.78925,
        "bytes": {"kv_resident_mean": 3 * 2**30, "state_resident_mean": 512 * 2**20, "copied_mean": 0.0},
        "ttft_s": {"mean": 0.4125, "p50": 0.31, "p95": 1.52, "p99": 2.0},
        "ttft_s_interval": {"mean": [0.4, 0.425]},
        "token_hit_rate_interval": [0.6, 0.66],
        "speedup": {"mean": 3.412, "low": 3.312, "high": 3.512},
        "seeds": [0, 1, 2],
        "groups": 12,
        "evicted_bytes": 0,
        "utilisation": 0.314,
        "stationarity": {"verdict": "steady", "drift_p": 0.5, "drift_rps": 0.0, "warmup_requests": 5},
    }
    return ArmData(name, "dp", {}, [], summary | changes)


def rows(text):
    return [line.split() for line in text.splitlines()]


def test_numbers_are_the_summaries(full):
    study = StudyData("toy", "footer", [make_arm()], [], "unlimited")
    (line,) = (line for line in as_text(study, 240).splitlines() if line.startswith("dp_3"))
    cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
    assert cells == [
        "dp_3",
        "63.1 %",
        "78.9 %",
        "80.1 %",
        "72.3 %",
        "9.2",
        "112 ms",
        "75.0 %",
        "631.4 k",
        "368.6 k",
        "412 [400, 425] ms",
        "310 ms",
        "1.52 s",
        "2.00 s",
        "3.41 [3.31, 3.51] ×",
        "31.4 %",
        "3.00 GiB",
        "512 MiB",
    ]


def test_csv_has_the_values_of_the_summary_and_every_column(full):
    study = StudyData("toy", "footer", [make_arm(), make_arm("other", speedup=None)], [], "-", failed={"lost": "why"})
    head, first, second, lost = (line.split(",") for line in csv_text(arms_table(study)).splitlines())
    values = dict(zip(head, first, strict=True))
    expected = {
        "arm": "dp_3",
        "token_hit_rate": "0.6314",
        "token_hit_rate_low": "0.6",
        "infinite_cache_share": "0.801",
        "offline_bound_tokens": "723000",
        "repaired_tokens": "0",
        "ttft_mean_s": "0.4125",
        "ttft_mean_high_s": "0.425",
        "ttft_p99_s": "2.0",
        "speedup_of_ttft": "3.412",
        "kv_and_copies_mean_bytes": str(3 * 2.0**30),
        "verdict": "steady",
    }
    assert {name: values[name] for name in expected} == expected
    assert dict(zip(head, second, strict=True))["speedup_of_ttft"] == ""
    assert lost == ["lost", *[""] * (len(head) - 1)]
    assert head == csv_text(arms_table(full)).splitlines()[0].split(","), "columns do not depend on the study"


def test_failed_arms_are_marked():
    text = as_text(StudyData("toy", "f", [make_arm()], [], "-", failed={"lost": "lost: no memory"}))
    assert ["lost", "failed"] in rows(text)
    assert text.rstrip().splitlines()[-2] == "lost: no memory"


def test_spans_anywhere_have_the_infinite_cache_of_their_lookup():
    study = StudyData("toy", "footer", [make_arm(finds="spans anywhere")], [], "unlimited")
    assert "90.2 %" in as_text(study, 240)
    assert "80.1 %" not in as_text(study, 240)


def test_every_arm_once_in_the_order_given(full):
    first = [row[0] for row in rows(as_text(full, 160)) if row]
    names = [arm.name for arm in full.arms]
    assert [word for word in first if word in names] == names


def test_one_seed_has_no_interval():
    study = StudyData(
        "toy", "footer", [make_arm(ttft_s_interval={"mean": [None, None]}, speedup=None)], [], "unlimited"
    )
    (line,) = (line for line in as_text(study, 160).splitlines() if line.startswith("dp_3"))
    assert "412 ms" in line
    assert "[" not in line
    assert "×" not in line


def test_a_saturated_arm_is_marked_instead_of_a_mean():
    state = {"verdict": "saturated", "drift_p": 0.0, "drift_rps": 1.0, "warmup_requests": None}
    arm = make_arm(stationarity=state, ttft_s=dict.fromkeys(("mean", "p50", "p95", "p99")), speedup=None)
    (line,) = (line for line in as_text(StudyData("toy", "f", [arm], [], "-"), 160).splitlines() if "dp_3" in line)
    assert "saturated" in line
    assert "×" not in line
    assert "ms" not in line


def test_an_unsettled_arm_is_marked():
    state = {"verdict": "unsettled", "drift_p": 0.5, "drift_rps": 0.0, "warmup_requests": 400}
    text = as_text(StudyData("toy", "f", [make_arm(stationarity=state)], [], "-"), 160)
    assert "412 [400, 425] ms †" in text
    assert "† not a steady state" in text


def test_a_speedup_has_its_load_in_the_heading():
    text = as_text(StudyData("toy", "f", [make_arm()], [], "-", load_words="1.5/s"), 160)
    assert "at 1.5/s" in text


def test_intervals_and_percentiles_name_their_samples():
    text = " ".join(as_text(StudyData("toy", "f", [make_arm()], [], "-"), 160).split())
    assert "95 % interval over 12 groups (documents) and 3 seeds (arrivals)" in text
    assert "percentiles of 200 requests" in text


def test_a_bound_of_zero_has_no_share():
    study = StudyData("toy", "footer", [make_arm(share_of_bound=None)], [], "unlimited")
    assert " – " in as_text(study, 160)


@pytest.mark.parametrize("width", [160, 120, 100, 80, 60])
def test_no_line_is_wider_than_the_terminal(full, width):
    text = as_text(full, width)
    assert max(map(len, text.splitlines())) <= width
    table = [line for line in text.splitlines() if line.startswith(("none", "dp_", "block_"))]
    assert not any("…" in line for line in table)


def test_wide_tables_have_all_columns_narrow_ones_list_dropped(full):
    assert "too narrow for" not in as_text(full, 240)
    note = " ".join(as_text(full, 120).split("too narrow for: ")[1].split())
    dropped = ["infinite cache", "request hit rate", "reused tokens", "computed tokens", "TTFT p50", "TTFT p95"]
    assert [name for name in note.split(", ") if name in dropped] == dropped
    assert not {"offline bound", "regret points", "TTFT mean"} & set(note.split(", "))


def test_provenance_is_above_and_definitions_are_below(full):
    text = as_text(full, 160)
    assert text.startswith(f"{full.title} · store: {full.store}\n{full.footer}\n")
    for definition in (
        "token hit rate = reused ÷ prompt tokens",
        "TTFT = first token − arrival",
        "depends on the load",
    ):
        assert definition in text
    assert "requests with at least one reused token ÷ requests" in " ".join(text.split())


def test_names_are_not_markup():
    study = StudyData("[bold]toy", "footer", [make_arm("dp[red]")], [], "unlimited")
    assert "dp[red]" in as_text(study)
    assert as_text(study).startswith("[bold]toy")


def test_degenerate_studies_have_a_table(degenerate):
    for study in degenerate.values():
        assert study.title in as_text(study)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (count_text(0), "0"),
        (count_text(9_999), "9999"),
        (count_text(15_534_000), "15.53 M"),
        (count_text(123_456), "123.5 k"),
        (byte_size_text(0), "0 B"),
        (byte_size_text(16 * 2**30), "16.0 GiB"),
        (byte_size_text(1023 * 2**20), "0.999 GiB"),
        (seconds_text(0.0971, (0.0899, 0.1043)), "97.1 [89.9, 104.3] ms"),
        (seconds_text(9.999), "10.0 s"),
        (seconds_text(None), "–"),
        (ratio_text(1.0, (1.0, 1.0)), "1.00 [1.00, 1.00] ×"),
        (significant(0.0042), "0.00420"),
        (percent_text(None), "–"),
    ],
)
def test_units_are_short_text(shown, text):
    assert shown == text


# -- The tables of losses and loads show the numbers of the summary. ---


def values(table):
    """Return rows as mappings from column name to value."""
    return [{c.name: cell.value for c, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def test_reused_and_causes_sum_to_the_prompt_tokens(studies):
    study = studies.make_study({name: studies.ARMS[name] for name in ("none", "dp_3")}, 2, 60)
    rows = values(losses_table(study))
    assert [row["arm"] for row in rows] == ["none", "dp_3"]
    for row, arm in zip(rows, study.arms, strict=True):
        assert row["reused_tokens"] == arm.summary["tokens"]["reused"]
        assert (
            sum(row[name] for name in ("reused_tokens", *(f"lost_{cause}" for cause in LOSS_CAUSES)))
            == (row["prompt_tokens"])
        )


def test_causes_that_no_arm_has_are_not_shown(studies):
    study = studies.make_study({"none": studies.ARMS["none"]}, 1, 30)
    shown = [column.name for column in losses_table(study).shown().columns]
    assert "lost_never_stored" in shown
    assert not {"lost_repair", "lost_kv_evicted"} & set(shown)


def test_loads_have_their_delays_and_intervals(full):
    rows = values(load_table(full))
    assert [(row["arm"], row["rate_rps"]) for row in rows] == [(point.arm, point.rate_rps) for point in full.load]
    for row, point in zip(rows, full.load, strict=True):
        assert row["ttft_mean_s"] == pytest.approx(point.ttft_s["mean"])
        assert (row["queue_mean_low_s"], row["queue_p99_s"]) == (point.queue_s["low"], point.queue_s["p99"])


def test_a_study_of_one_load_has_no_load_table(full, degenerate):
    assert [table.name for table in study_tables(full)] == ["arms", "losses", "load"]
    for study in degenerate.values():
        assert [table.name for table in study_tables(study)] == ["arms", "losses", *(["load"] if study.load else [])]
