"""The tracker: offline inside the study's folder, closed whatever happens, absent when it is off."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spanlab.main import compose
from spanlab.study import results
from spanlab.study.run import run_study

TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "seeds=[0]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "workers=1",
    "only=[none,boundary]",
)


class FakeWandb(SimpleNamespace):
    """Notes what it is told."""

    def __init__(self, *, logged_in: bool = False) -> None:
        super().__init__(told=[], Table=lambda **table: ("table", table), Image=lambda path: ("image", path))
        self.Settings = lambda **settings: settings
        self.Error = type("Error", (Exception,), {})
        self.login = lambda prompt: logged_in
        self.summary: dict[str, Any] = {}

    def init(self, **options: Any) -> SimpleNamespace:
        self.told.append(("init", options))
        return SimpleNamespace(
            summary=self.summary,
            log=lambda values: self.told.append(("log", values)),
            finish=lambda **how: self.told.append(("finish", how)),
        )


@pytest.fixture
def fake(monkeypatch) -> FakeWandb:
    """A wandb that nobody is logged in to."""
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def track(root: Path, *overrides: str) -> Path:
    return run_study(compose("smoke", [*TOY, "tracking=wandb", *overrides]), "smoke", root)


def test_config_summary_table_and_figures_are_logged(fake: FakeWandb, tmp_path: Path):
    track(tmp_path, "output.run=mine")
    kinds = [kind for kind, _ in fake.told]
    assert (kinds[0], kinds[-1]) == ("init", "finish")
    options = fake.told[0][1]
    assert (options["name"], options["mode"]) == ("mine", "offline")
    assert options["config"]["workload"]["documents"] == 2
    assert set(fake.summary["arms"]) == {"none", "boundary"}
    assert fake.summary["workload"]["provenance"] == "measured shape"
    logged = {name: value for kind, values in fake.told if kind == "log" for name, value in values.items()}
    assert [row[0] for row in logged["arms"][1]["data"]] == ["none", "boundary"]
    pictures = {path.stem for path in tmp_path.glob("quality/mine/figures/*.png")}
    assert pictures
    assert {name for name in logged if name.startswith("figures/")} == {f"figures/{name}" for name in pictures}
    assert fake.told[-1] == ("finish", {})


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_study_that_fails_is_closed_as_failed(error: BaseException, fake: FakeWandb, monkeypatch, tmp_path: Path):
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(results, "compare", fail)
    with pytest.raises(type(error)):
        track(tmp_path, "output.figures=false")
    assert [what for what in fake.told if what[0] == "finish"] == [("finish", {"exit_code": 1})]


def test_a_worker_that_fails_closes_the_run_too(fake: FakeWandb, monkeypatch, tmp_path: Path):
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spanlab_sim.run.simulate", fail)
    with pytest.raises(OSError, match="No space"):
        track(tmp_path, "output.figures=false")
    assert fake.told[-1] == ("finish", {"exit_code": 1})


@pytest.mark.parametrize("where", ["log", "finish", "init"])
def test_a_tracker_that_cannot_write_is_a_warning(where: str, fake: FakeWandb, monkeypatch, capfd, tmp_path: Path):
    """A home that is read-only once hid a finished study."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system", "/home/.local")

    real = fake.init

    def init(**options: Any) -> SimpleNamespace:
        run = real(**options)
        setattr(run, where, refuse)
        return run

    monkeypatch.setattr(fake, "init", refuse if where == "init" else init)
    folder = track(tmp_path, "output.run=mine")
    assert (folder / "summary.json").exists()
    assert folder.name == "mine"
    warnings = [line for line in capfd.readouterr().err.splitlines() if "tracking.kind=wandb stopped" in line]
    assert len(warnings) == 1
    assert "Read-only file system" in warnings[0]


@pytest.mark.parametrize(
    ("mode", "logged_in", "used"),
    [
        ("auto", False, "offline"),
        ("auto", True, "online"),
        ("offline", True, "offline"),
        ("online", False, "online"),
    ],
)
def test_the_mode(mode: str, logged_in: bool, used: str, monkeypatch, tmp_path: Path):
    fake = FakeWandb(logged_in=logged_in)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    track(tmp_path, "output.figures=false", f"tracking.mode={mode}")
    assert fake.told[0][1]["mode"] == used


def test_an_offline_run_lies_in_the_folder(started, tmp_path: Path):
    online = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in online} | {"HOME": str(tmp_path)}
    how = ("tracking=wandb", "tracking.mode=offline", "output.run=mine")
    process = started(tmp_path, "smoke", *TOY, *how, env=environment)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    (run,) = tmp_path.joinpath("quality", "mine", "wandb").glob("offline-run-*")
    assert list(run.glob("run-*.wandb"))
    assert [path.name for path in tmp_path.joinpath("quality").iterdir() if path.suffix != ".lock"] == ["mine"]


def test_without_tracking_wandb_is_never_imported(tmp_path: Path):
    program = f"""
import sys
from spanlab.main import compose
from spanlab.study.run import run_study
run_study(compose("smoke", {[*TOY, "tracking=none"]!r}), "smoke", __import__("pathlib").Path({str(tmp_path)!r}))
sys.exit("wandb" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_terminal_that_cannot_be_written_hides_nothing(started, tmp_path: Path):
    environment = dict(os.environ) | {"PYTHONIOENCODING": "ascii"}
    process = started(tmp_path, "smoke", *TOY, "tracking=none", "output.run=mine", env=environment)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert (tmp_path / "quality" / "mine" / "summary.json").exists()
