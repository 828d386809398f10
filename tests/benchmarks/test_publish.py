"""Publishing: copied runs, filled pages, and refusal of runs without a commit."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import headline
import numpy as np
import publish
import pytest
import yaml
from PIL import Image

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
SWEPT = (*TOY, "output.run=swept", "output.figures=false", 'sweep=["store.total_gib=1,2"]')
COMMANDS = {name: f"bash runall.sh -cn smoke {shlex.join(words)}" for name, words in (("toy", TOY), ("swept", SWEPT))}
MANIFEST = {
    "toy": {
        "run": "outputs/quality/toy",
        "commands": [COMMANDS["toy"]],
        "tables": {"arms": ["token_hit_rate", "ttft_mean_s", "ttft_mean_low_s"], "losses": []},
        "figures": ["loss_by_cause"],
        "numbers": ["arms.*.requests", "seeds.1", "nothing.there"],
    },
    "toy/swept": {
        "run": "outputs/quality/swept",
        "commands": [COMMANDS["swept"]],
        "tables": {"token_hit_rate_by_store.total_gib": []},
        "figures": [],
        "rows": {"data": ["rows"]},
    },
}
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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study and a sweep, finished."""
    root = tmp_path_factory.mktemp("runs")
    run_study(compose("smoke", [*TOY, "output.run=toy"]), "smoke", root)
    swept = compose("smoke", list(SWEPT))
    run_sweep(swept, "smoke", root, lambda override: compose("smoke", [*SWEPT[:-1], override]))
    return root


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def root(runs: Path, tmp_path: Path) -> Path:
    """A repository of three commits with a manifest, a page, and runs of its second commit."""
    (tmp_path / "benchmarks" / "toy").mkdir(parents=True)
    (tmp_path / "benchmarks" / "manifest.yaml").write_text(yaml.safe_dump(MANIFEST))
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


def test_pages_get_tables_figures_and_the_age_of_the_commit(root):
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
    assert f"`{COMMANDS['toy']}`: measured shape" in (root / "README.md").read_text()
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("README.md", "overrides.yaml", "headline.json", "arms.csv", "losses.csv", "loss_by_cause.png", "swept")
    }


def test_a_headline_has_origin_arms_and_named_numbers(root):
    publish.main(["toy", "toy/swept"], root)
    folder = root / "benchmarks" / "toy"
    found = json.loads((folder / "headline.json").read_text())
    summary = json.loads((root / "outputs" / "quality" / "toy" / "summary.json").read_text())
    arm = summary["arms"]["boundary"]
    kept = {"token_hit_rate": arm["token_hit_rate"], "requests": arm["requests"], "speedup": arm["speedup"]}
    kept["ttft_s"] = {key: arm["ttft_s"][key] for key in ("mean", "p99")}
    kept["speedup"] = arm["speedup"] and {"mean": arm["speedup"]["mean"]}
    assert found["arms"]["boundary"] == kept
    assert found["commit"] == summary["commit"]
    assert found["clean"] is True
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["sizes"]["name"] == summary["model"]
    assert "nothing" not in found
    assert yaml.safe_load((folder / "overrides.yaml").read_text()) == list(TOY)


def test_lists_of_a_summary_become_rows(root):
    publish.main(["toy/swept"], root)
    folder = root / "benchmarks" / "toy" / "swept"
    summary = json.loads((root / "outputs" / "quality" / "swept" / "summary.json").read_text())
    assert headline.read_data(folder / "data.csv") == summary["rows"]
    assert json.loads((folder / "headline.json").read_text())["points"] == 2


def test_rows_inside_entries_repeat_their_parents(tmp_path: Path):
    inside = [{"b": [1.5, None], "on": True}, {"b": [2.0, 0.1], "on": False}]
    rows = headline.flat_rows({"a": [{"name": "x", "in": inside}, {"in": []}]}, ("a", "in"))
    assert rows[1] == {"name": "x", "in.b.0": 2.0, "in.b.1": 0.1, "in.on": False}
    headline.write_rows(tmp_path / "rows.csv", rows)
    assert headline.read_data(tmp_path / "rows.csv") == rows


def test_json_takes_one_line_where_it_fits():
    value = {"short": {"a": [1, 2]}, "long": ["x" * 100, {"b": "y" * 100}], "none": {}}
    text = headline.to_text(value)
    assert json.loads(text) == value
    assert text.splitlines()[1] == ' "short": {"a": [1, 2]},'
    assert len(text.splitlines()) == 8


def test_large_figures_lose_colours_and_small_ones_nothing(tmp_path: Path):
    drawn = tmp_path / "drawn.png"
    for noise, side in ((True, 180), (False, 20)):
        values = np.random.default_rng(0).integers(0, 255 if noise else 2, (side, side, 3), dtype=np.uint8)
        Image.fromarray(values).save(drawn)
        headline.copy_figure(drawn, tmp_path / "copied.png")
        assert (drawn.stat().st_size > headline.FIGURE_BYTES) == noise
        assert (tmp_path / "copied.png").stat().st_size <= headline.FIGURE_BYTES
    assert (tmp_path / "copied.png").read_bytes() == drawn.read_bytes()


def test_other_settings_are_reported_and_taken_on_request(root):
    publish.main(["toy", "toy/swept"], root)
    assert publish.check(root) == []
    stored = root / "benchmarks" / "toy" / "overrides.yaml"
    stored.write_text(stored.read_text() + "- seeds=[7]\n")
    assert publish.check(root) == ["toy: published by other settings than its command has now"]
    assert publish.rehash(["toy/swept"], root) == []
    changed = publish.rehash([], root)
    assert [sentence.partition(":")[0] for sentence in changed] == ["toy"]
    assert publish.check(root) == []


@pytest.mark.parametrize("words", ["[no.such.key=1]", "[workload=nothing]", "[seeds=x]"])
def test_a_published_config_that_no_longer_composes_is_named(words: str, root):
    publish.main(["toy"], root)
    (root / "benchmarks" / "toy" / "overrides.yaml").write_text(words)
    with pytest.raises(ValueError, match=r"^toy: expected an entry and overrides that compose: "):
        publish.check(root)


def test_publishing_again_changes_nothing(root):
    publish.main(["toy"], root)
    before = {path: path.read_bytes() for path in root.glob("benchmarks/**/*") if path.is_file()}
    publish.main(["toy"], root)
    assert {path: path.read_bytes() for path in root.glob("benchmarks/**/*") if path.is_file()} == before


@pytest.mark.parametrize("commit", ["unknown", "{}-dirty", "0123456789ab"])
def test_a_run_without_a_commit_is_refused_and_nothing_is_written(commit: str, root):
    set_commit(root / "outputs" / "quality" / "toy", commit.format(git(root, "rev-parse", "--short=12", "HEAD")))
    with pytest.raises(ValueError, match=r"^commit=.*: expected a "):
        publish.main(["toy"], root)
    assert not (root / "benchmarks" / "toy" / "headline.json").exists()
    assert (root / "benchmarks" / "toy" / "README.md").read_text() == PAGE


@pytest.mark.parametrize("names", [[], ["nothing"]])
def test_an_unknown_name_is_refused_with_the_known_ones(names: list[str], root):
    with pytest.raises(ValueError, match=r"expected some of toy, toy/swept, .*must_hold"):
        publish.main(names, root)


def test_measured_texts_are_filled_from_their_file(root):
    (root / "benchmarks" / "must_hold").mkdir()
    shutil.copy(SCRIPTS / "must_hold" / "in_turns.json", root / "benchmarks" / "must_hold" / "in_turns.json")
    page = root / "benchmarks" / "must_hold" / "README.md"
    page.write_text("<!-- in_turns -->\n<!-- /in_turns -->\n<!-- must_hold -->\nkept\n<!-- /must_hold -->\n")
    publish.main(["must_hold"], root)
    assert "an earlier commit ran in turns" in page.read_text()
    assert "kept" in page.read_text(), "results.json is not there"
