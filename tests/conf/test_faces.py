"""The faces that Hydra gives the script: help, the resolved config, sweeps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spanlab import cli
from spanlab.compiled import CONF


def test_help_names_every_group_with_its_choices(spanlab):
    said = spanlab("-cn", "quality_sim", "--help")
    assert said.code == 0
    lines = dict(line.split(": ", 1) for line in said.out.splitlines() if ": " in line)
    for folder in (path for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"):  # Hydra's own settings
        assert {path.stem for path in folder.glob("*.yaml")} <= set(lines[folder.name].split(", "))
    assert lines["executor"] == "dask, here, local"  # whose choices need no files


def test_cfg_job_prints_the_resolved_config_and_runs_nothing(spanlab, tmp_path: Path):
    said = spanlab("-cn", "quality_sim", "--cfg", "job", "arrivals.rate_rps=3.5", f"output.root={tmp_path}")
    assert said.code == 0
    shown = yaml.safe_load(said.out)
    assert shown["arrivals"]["rate_rps"] == 3.5
    assert len(shown["arms"]) == 30
    assert list(tmp_path.iterdir()) == []


def runs_of(root: Path) -> list[Path]:
    """Folders of runs; beside them lie only locks."""
    return [path for path in root.joinpath("quality").iterdir() if path.suffix != ".lock"]


LAUNCHERS = {"basic": (), "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")}


@pytest.fixture
def sweeping(spanlab, console) -> Callable[..., Any]:
    """Call the script as a launcher allows: the basic one runs its jobs in this process too."""
    return lambda launcher, *typed: (spanlab if launcher == "basic" else console)("-m", *typed, *LAUNCHERS[launcher])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_job_of_a_sweep_has_its_own_folder(launcher: str, sweeping, toy, tmp_path: Path):
    where = (f"output.root={tmp_path}", f"hydra.sweep.dir={tmp_path}/hydra", "only=[none, boundary]")
    swept = "+strategy@arms.mine=radix,branch"
    done = sweeping(launcher, "-cn", "smoke", *toy, *where, swept)
    assert done.code == 0, done.err
    found = [
        (yaml.safe_load((path.parent / "config.yaml").read_text()), json.loads(path.read_bytes()))
        for path in tmp_path.glob("quality/*/summary.json")
    ]
    jobs = sorted(config["arms"]["mine"]["placement"]["kind"] for config, _ in found)
    assert jobs == ["branch", "none"]
    assert all(list(summary["arms"]) == ["none", "boundary"] for _, summary in found)


@pytest.mark.parametrize(("mode", "by_hydra"), [("MULTIRUN", True), ("RUN", False)])
def test_a_file_with_hydras_mode_is_run_by_hydra(mode, by_hydra, spanlab, monkeypatch, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(f"defaults: [smoke, _self_]\nhydra:\n  mode: {mode}\n")
    ran = []
    monkeypatch.setattr(cli, "_entry", lambda: ran.append(True))
    monkeypatch.setattr(cli, "_run_entry", lambda settings: ran.append(False))
    assert spanlab("--config-dir", str(tmp_path), "-cn", "mine").code == 0
    assert ran == [by_hydra]


def test_several_values_without_m_are_a_sentence(spanlab):
    said = spanlab("-cn", "smoke", "store.total_gib=1,2")
    assert said.code == 1
    assert "Ambiguous value for argument 'store.total_gib=1,2'" in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_jobs_of_a_sweep_with_one_name_replace_nothing(launcher: str, sweeping, toy, tmp_path: Path):
    where = (f"output.root={tmp_path}", f"hydra.sweep.dir={tmp_path}/hydra", "only=[none]", "output.run=sw")
    done = sweeping(launcher, "-cn", "smoke", *toy, *where, "store.total_gib=1,2")
    assert done.code == 0, done.err
    assert sorted(path.name.partition("total_gib=")[2][0] for path in runs_of(tmp_path)) == ["1", "2"]
    assert all(path.name.startswith("sw__") for path in runs_of(tmp_path))


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_a_sweep_with_a_mistake_in_it_fails_with_one_sentence(launcher: str, sweeping, toy, one_sentence, tmp_path):
    where = (f"output.root={tmp_path}", f"hydra.sweep.dir={tmp_path}/hydra", "only=[none]")
    done = sweeping(launcher, "-cn", "smoke", *toy, *where, "arrivals.rate_rps=-1,2")
    one_sentence(done, "arrivals.rate_rps=-1.0: expected a number above zero")


def test_what_was_set_names_the_folder_and_incidental_settings_do_not(spanlab, toy, tmp_path: Path):
    here = (f"output.root={tmp_path}", "output.if_exists=fail", "only=[none]")
    assert spanlab("-cn", "smoke", *toy, *here, "workload.documents=1").code == 0
    (folder,) = runs_of(tmp_path)
    assert folder.name.startswith("smoke__")
    assert str(tmp_path) not in folder.name
    again = spanlab("-cn", "smoke", *toy, *here, "workload.documents=1", "workers=2", "tracking.mode=offline")
    assert again.code == 1
    assert "exists" in again.ours[0]


def test_the_folder_that_is_printed_is_the_folder(spanlab, toy, tmp_path: Path):
    done = spanlab("-cn", "smoke", *toy, f"output.root={tmp_path}", "only=[none]")
    (folder,) = runs_of(tmp_path)
    assert str(folder) in done.err
