"""The entry `compare`: finished runs side by side, in a new folder."""

import csv
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from spanlab.api import load
from spanlab.cli import compose
from spanlab.errors import sentence
from spanlab.study.compare import run_compare
from spanlab.study.run import run_study

TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "load.rates_rps=[]",
    "load.arms=[]",
    "only=[none,boundary]",
    "executor.kind=here",
)


def rows(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def compared(run_here: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Run `smoke` once per tuple of overrides and compare the runs."""

    def compare(*variants: tuple[str, ...]) -> Path:
        runs = [
            run_here(tmp_path, "smoke", *TOY, *overrides, f"output.run=run{n}") for n, overrides in enumerate(variants)
        ]
        settings = compose("compare", [f"runs=[{','.join(map(str, runs))}]"])
        return run_compare(settings, "compared", tmp_path)

    return compare


def test_equal_runs_are_the_same_and_no_setting_differs(compared, capsys):
    folder = compared(("seeds=[0,1]",), ("seeds=[0,1]",))
    table_rows = rows(folder, "arms")
    assert [row["arm"] for row in table_rows] == ["none", "boundary"]
    assert {row[f"{name}_verdict"] for row in table_rows for name in ("token_hit_rate", "ttft", "e2e")} == {"same"}
    assert {(row["paired_requests"], row["paired_seeds"]) for row in table_rows} == {("12", "2")}
    assert rows(folder, "settings_that_differ") == []
    assert "no setting differs" in capsys.readouterr().out
    assert (folder / "report.html").exists()


def test_another_model_changes_delays_of_the_same_requests(compared):
    folder = compared(("seeds=[0,1]",), ("seeds=[0,1]", "hardware.compute_efficiency=0.25"))
    for row in rows(folder, "arms"):
        assert row["ttft_verdict"] == "differs"
        assert 1 < float(row["ttft_ratio_low"]) <= float(row["ttft_ratio"])
    (differing,) = rows(folder, "settings_that_differ")
    assert (differing["setting"], differing["run1"]) == ("hardware.compute_efficiency", "0.25")


def test_other_arrivals_cannot_be_paired_and_other_arms_are_named(compared, capsys):
    folder = compared(("seeds=[0]",), ("arrivals.rate_rps=9", "only=[none]"))
    (row,) = rows(folder, "arms")
    assert row["arm"] == "none"
    assert row["ttft_verdict"] == row["token_hit_rate_verdict"] == "cannot be paired: arrivals differ"
    assert row["ttft_ratio"] == ""
    assert "not in every run, run0: boundary" in capsys.readouterr().out


def test_columns_are_over_the_pairs_of_their_differences(compared, capsys):
    """Seed 1 of the second run, which has no pair, changes no column: equal pairs have equal columns."""
    folder = compared(("seeds=[0]",), ("seeds=[0,1]",))
    alone = {row["arm"]: row for row in rows(folder.parents[1] / "quality" / "run0", "arms")}
    for row in rows(folder, "arms"):
        assert row["token_hit_rate_verdict"] == row["ttft_verdict"] == "same"
        for column in ("token_hit_rate_{}", "ttft_mean_{}_s"):
            assert row[column.format("first")] == row[column.format("run")]
        hit_rate = float(alone[row["arm"]]["token_hit_rate"])
        assert float(row["token_hit_rate_first"]) == pytest.approx(hit_rate, rel=1e-12)
    assert "95 % intervals over 2 groups (documents) are too narrow" in capsys.readouterr().out


def test_every_run_is_compared_with_the_first(compared):
    folder = compared(("seeds=[0]",), ("seeds=[0,1]",), ("seeds=[1]",))
    verdicts = {(row["run"], row["arm"]): row["ttft_verdict"] for row in rows(folder, "arms")}
    assert verdicts[("run1", "none")] == "same", "of seed 0, which both have"
    assert verdicts[("run2", "none")] == "cannot be paired: no common seed"
    assert len(orjson.loads((folder / "summary.json").read_bytes())["compared"]) == 3


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (["a"], r"^runs=\['a'\]: expected two folders or more"),
        (["a", "b"], r"^runs=a: expected the folder of a finished run"),
        (["a", "./a"], r"expected different runs"),
    ],
)
def test_what_cannot_be_compared_is_refused(runs: list[str], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        run_compare(compose("compare", [f"runs=[{','.join(runs)}]"]), "compared", tmp_path)
    assert not (tmp_path / "compare" / "compared").exists()


def test_records_of_another_version_are_refused_by_name(run_here: Callable[..., Path], tmp_path: Path):
    runs = [run_here(tmp_path, "smoke", *TOY, "only=[none]", f"output.run=run{n}") for n in range(2)]
    path = runs[1] / "records" / "none.jsonl"
    lines: list[dict[str, Any]] = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(
        b"".join(orjson.dumps({k: v for k, v in line.items() if k != "group_id"}) + b"\n" for line in lines)
    )
    settings = compose("compare", [f"runs=[{runs[0]},{runs[1]}]"])
    with pytest.raises(ValueError, match=r"none\.jsonl: expected records of this version: a record has no group_id"):
        run_compare(settings, "compared", tmp_path)


NO_SUMMARY = [b"", b"{", b"[]", b"{}", b"7", b'{"commit": "x"}', b"\xff", b"[1, 2]"]
NO_CONFIG = [b"", b"[]", b"a: [", b"arrivals: 3", b"arrivals: {}", b"\xff"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [("summary.json", data) for data in NO_SUMMARY]
    + [("config.yaml", data) for data in NO_CONFIG]
    + [("records/none.jsonl", data) for data in (b"", b"{}", b"[]", b"7", b"{", b'{"seed": "x"}', b"\xff")],
)
def test_damaged_run_is_refused_with_its_file(file: str, damage: bytes, one_run: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(one_run, other)
    (other / file).write_bytes(damage)
    settings = compose("compare", [f"runs=[{one_run},{other}]"])
    with pytest.raises((ValueError, OSError)) as error:
        run_compare(settings, "compared", tmp_path)
    assert str(other / file) in sentence(error.value)
    if file == "summary.json" and b"commit" not in damage:
        with pytest.raises(ValueError, match=re.escape(str(other / file))):
            _ = load(other).details["caveats"]


def test_each_missing_key_of_a_summary_is_named(one_run: Path, tmp_path: Path):
    summary = orjson.loads((one_run / "summary.json").read_bytes())
    other = tmp_path / "other"
    shutil.copytree(one_run, other)
    for key in ("commit", "machine", "caveats", "failed", "model", "workload"):
        (other / "summary.json").write_bytes(orjson.dumps({name: summary[name] for name in summary if name != key}))
        with pytest.raises(ValueError, match=rf"^{other}/summary.json: no {key}.*; expected the folder of a run that"):
            run_compare(compose("compare", [f"runs=[{one_run},{other}]"]), "compared", tmp_path)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory) -> Path:
    """A finished run, which tests copy."""
    quiet = ("output.figures=false", "tracking.kind=none", "analyses=[summary]", "output.run=one")
    return run_study(compose("smoke", [*quiet, *TOY]), "smoke", tmp_path_factory.mktemp("one"), show=False)
