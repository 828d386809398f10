"""The Python API: the same runs as the command line, nothing printed, mistakes as ValueError."""

import logging
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import orjson
import polars as pl
import pytest

import spanlab
from spanlab.records import Record

from ..conf.conftest import spanlab as _spanlab

spanlab_script = _spanlab  # a fixture
TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "load.rates_rps=[]",
    "load.arms=[]",
    "only=[none,boundary]",
    "output.figures=false",
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> spanlab.Result:
    """A small study of two arms and two seeds."""
    return spanlab.run("smoke", *TOY, "seeds=[0,1]", f"output.root={tmp_path_factory.mktemp('api')}")


def test_records_are_those_of_the_files(result):
    assert result.records.columns == ["arm", *(field.name for field in fields(Record))]
    lines = (result.folder / "records" / "boundary.jsonl").read_bytes().splitlines()
    rows = result.records.filter(pl.col("arm") == "boundary").drop("arm").to_dicts()
    assert rows == [orjson.loads(line) for line in lines]


def test_summary_runs_and_details_agree(result):
    assert result.summary["arm"].to_list() == ["none", "boundary"]
    for name, arm in result.details["arms"].items():
        row = result.summary.row(by_predicate=pl.col("arm") == name, named=True)
        assert row["token_hit_rate"] == arm["token_hit_rate"]
        assert result.runs.filter(pl.col("arm") == name)["seed"].to_list() == arm["seeds"] == [0, 1]
    assert set(result.tables) >= {"arms", "losses"}
    assert result.report.is_file()
    assert result.config["workload"]["documents"] == 2


def test_the_run_has_the_name_that_the_command_line_gives(result, tmp_path: Path, spanlab_script):
    done = spanlab_script("-cn", "smoke", *TOY, "seeds=[0,1]", f"output.root={tmp_path}")
    assert done.code == 0, done.err
    (run,) = (path.parent for path in tmp_path.glob("*/*/summary.json"))
    assert run.name == result.folder.name
    assert spanlab.load(run).records.equals(result.records)


def test_nothing_is_printed_and_everything_is_logged(tmp_path: Path, capfd, caplog):
    with caplog.at_level(logging.INFO, logger="spanlab"):
        spanlab.run("smoke", *TOY, "seeds=[0]", f"output.root={tmp_path}")
    assert capfd.readouterr() == ("", "")
    assert any("measured shape" in line for line in caplog.messages)


def test_figures_are_files_by_name(tmp_path: Path):
    overrides = [override for override in TOY if "figures" not in override]
    figures = spanlab.run("smoke", *overrides, "seeds=[0]", f"output.root={tmp_path}").figures
    assert "loss_by_cause" in figures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.values())


def test_a_sweep_has_one_row_per_arm_and_point(tmp_path: Path):
    swept = 'sweep=["store.total_gib=1,2"]'
    result = spanlab.run("smoke", *TOY, "seeds=[0]", swept, "output.run=s", f"output.root={tmp_path}")
    assert result.summary.select("arm", "value").rows() == [
        (arm, value) for value in (1.0, 2.0) for arm in ("none", "boundary")
    ]
    with pytest.raises(ValueError, match=r"^records of .*: expected a study; a sweep has those of its points$"):
        _ = result.records


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), r"^entry nothing: not in conf/"),
        (("smoke", "sede=1"), r"^sede: no such key"),
        (("smoke", "seeds=[]"), r"^seeds=\[\]: expected one or more"),
        (
            ("schedule", "preset=vllm_0_32", "cases=x.json", "out=y.json"),
            r"^entry=schedule: expected a study or a sweep",
        ),
    ],
)
def test_a_mistake_is_a_value_error_with_one_sentence(arguments, words):
    with pytest.raises(ValueError, match=words) as raised:
        spanlab.run(*arguments)
    assert "\n" not in str(raised.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^folder=.*: expected the folder of a finished run"):
        spanlab.load(tmp_path)


def test_importing_the_package_imports_nothing_else():
    code = "import sys, spanlab; sys.exit(bool({'polars', 'hydra', 'numpy', 'spanlab.api'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_that_of_the_distribution():
    assert spanlab.__version__ == version("spanlab")
    with pytest.raises(AttributeError, match="no attribute nothing"):
        spanlab.nothing  # noqa: B018
