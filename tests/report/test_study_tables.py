"""The tables of losses and loads show the numbers of the summary."""

import pytest

from spanlab.analyses.summary import load_table, losses_table, study_tables
from spanlab.records import LOSS_CAUSES


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
        assert [table.name for table in study_tables(study)] == [
            "arms",
            "losses",
            *(["load"] if study.load else []),
        ]
