"""Publishing: copied runs, filled pages, and refusal of runs without a commit."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study
from spanlab.study.sweep import run_sweep

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "load.rates_rps=[]",
    "load.arms=[]",
    "only=[none,boundary]",
)
MANIFEST = """
toy:
  run: outputs/quality/toy
  commands: [bash runall.sh -cn smoke]
  tables: {arms: [token_hit_rate, ttft_mean_s, ttft_mean_low_s], losses: []}
  figures: [loss_by_cause]
toy/swept:
  run: outputs/quality/swept
  commands: [bash runall.sh -cn smoke]
  tables: {token_hit_rate_by_store.total_gib: []}
  figures: []
"""
PAGE = """# Toy
<!-- toy -->
old
<!-- /toy -->
between
<!-- toy:arms -->
old
<!-- /toy:arms -->
<!-- toy/swept:token_hit_rate_by_store.total_gib -->
<!-- /toy/swept:token_hit_rate_by_store.total_gib -->
<!-- other -->
kept
<!-- /other -->
"""


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script; other tests' modules may have its name."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    for name in ("publish", "texts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("publish")
    for name in ("publish", "texts"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study and a sweep, finished."""
    root = tmp_path_factory.mktemp("runs")
    run_study(compose("smoke", [*TOY, "output.run=toy"]), "smoke", root)
    given = [*TOY, "output.run=swept", "output.figures=false"]
    swept = compose("smoke", [*given, 'sweep=["store.total_gib=1,2"]'])
    run_sweep(swept, "smoke", root, lambda override: compose("smoke", [*given, override]))
    return root


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(runs: Path, tmp_path: Path) -> Path:
    """A repository of three commits with a manifest, a page, and runs of its second commit."""
    (tmp_path / "benchmarks" / "toy").mkdir(parents=True)
    (tmp_path / "benchmarks" / "manifest.yaml").write_text(MANIFEST)
    (tmp_path / "benchmarks" / "toy" / "README.md").write_text(PAGE)
    (tmp_path / "README.md").write_text("<!-- toy:where -->\n<!-- /toy:where -->\n")
    git(tmp_path, "init", "-q")
    commits = []
    for number in range(3):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", str(number))
        commits.append(git(tmp_path, "rev-parse", "--short=12", "HEAD"))
    shutil.copytree(runs, tmp_path / "outputs")
    for run in ("toy", "swept"):
        set_commit(tmp_path / "outputs" / "quality" / run, commits[1])
    return tmp_path


def set_commit(run: Path, commit: str) -> None:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"commit": commit}))


def test_pages_get_tables_figures_and_the_age_of_the_commit(publish, root):
    publish.main(["toy", "toy/swept"], root)
    folder = root / "benchmarks" / "toy"
    page = (folder / "README.md").read_text()
    assert page.count("measured 1 commit before publication") == 5, "where, two tables, one table, the sweep's table"
    assert page.count("| arm | token hit rate | TTFT mean |\n") == 2
    assert "![loss_by_cause](./loss_by_cause.png)" in page
    assert "| arm | 1 | 2 |" in page
    assert "old" not in page
    assert "between" in page
    assert "kept" in page
    assert "`bash runall.sh -cn smoke`: measured shape" in (root / "README.md").read_text()
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("README.md", "config.yaml", "summary.json", "arms.csv", "losses.csv", "loss_by_cause.png", "swept"),
    }


def test_publishing_again_changes_nothing(publish, root):
    publish.main(["toy"], root)
    before = {path: path.read_bytes() for path in root.glob("benchmarks/**/*") if path.is_file()}
    publish.main(["toy"], root)
    assert {path: path.read_bytes() for path in root.glob("benchmarks/**/*") if path.is_file()} == before


@pytest.mark.parametrize("commit", ["unknown", "{}-dirty", "0123456789ab"])
def test_a_run_without_a_commit_is_refused_and_nothing_is_written(commit: str, publish, root):
    set_commit(root / "outputs" / "quality" / "toy", commit.format(git(root, "rev-parse", "--short=12", "HEAD")))
    with pytest.raises(ValueError, match=r"^commit=.*: expected a "):
        publish.main(["toy"], root)
    assert not (root / "benchmarks" / "toy" / "summary.json").exists()
    assert (root / "benchmarks" / "toy" / "README.md").read_text() == PAGE


@pytest.mark.parametrize("names", [[], ["nothing"]])
def test_an_unknown_name_is_refused_with_the_known_ones(names: list[str], publish, root):
    with pytest.raises(ValueError, match=r"expected some of toy, toy/swept, .*must_hold"):
        publish.main(names, root)


def test_measured_texts_are_filled_from_their_file(publish, root):
    (root / "benchmarks" / "must_hold").mkdir()
    shutil.copy(SCRIPTS / "must_hold" / "in_turns.json", root / "benchmarks" / "must_hold" / "in_turns.json")
    page = root / "benchmarks" / "must_hold" / "README.md"
    page.write_text("<!-- in_turns -->\n<!-- /in_turns -->\n<!-- must_hold -->\nkept\n<!-- /must_hold -->\n")
    publish.main(["must_hold"], root)
    assert "an earlier commit ran in turns" in page.read_text()
    assert "kept" in page.read_text(), "results.json is not there"
