"""The tracker: offline inside the study's folder, closed in every case, absent if disabled."""

import io
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from spanlab import cli
from spanlab.cli import compose
from spanlab.settings.server import TrackingSettings
from spanlab.study.run import run_study
from spanlab.tracking import tracked

TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "seeds=[0]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "workers=1",
    "only=[none,boundary]",
)
QUIET = ("tracking=wandb", "output.figures=false")


class FakeWandb(SimpleNamespace):
    """Records its calls."""

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
    """A wandb without a login."""
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def track(root: Path, *overrides: str) -> Path:
    return run_study(compose("smoke", [*TOY, "executor.kind=here", "tracking=wandb", *overrides]), "smoke", root)


def call_main(monkeypatch, *overrides: str) -> None:
    """The console script's function, in this process."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["spanlab", "-cn", "smoke", *overrides])
    cli.main()


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
    assert {path.stem for path in tmp_path.glob("quality/mine/tables/*.csv")} == {"arms", "losses"} <= set(logged)
    pictures = {path.stem for path in tmp_path.glob("quality/mine/figures/*.png")}
    assert pictures
    assert {name for name in logged if name.startswith("figures/")} == {f"figures/{name}" for name in pictures}
    assert fake.told[-1] == ("finish", {})


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_fails_while_it_is_tracked_is_closed_as_failed(error: BaseException, fake: FakeWandb, tmp_path: Path):
    settings = TrackingSettings(kind="wandb")
    with pytest.raises(type(error)), tracked(settings, "name", "group", {}, tmp_path):
        raise error
    assert [call for call in fake.told if call[0] == "finish"] == [("finish", {"exit_code": 1})]


def test_a_study_that_fails_is_not_tracked(fake: FakeWandb, monkeypatch, tmp_path: Path):
    def fail(*arguments: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr("spanlab.analyses.summary.study_tables", fail)
    with pytest.raises(ValueError, match="no"):
        track(tmp_path, "output.figures=false")
    assert fake.told == []


def test_the_folder_is_published_before_anything_is_printed_or_tracked(fake: FakeWandb, monkeypatch, tmp_path: Path):
    published: list[tuple[str, bool]] = []
    real = fake.init

    def note(event: str) -> None:
        published.append((event, (tmp_path / "quality" / "mine" / "summary.json").exists()))

    monkeypatch.setattr("spanlab.analyses.base.print_tables", lambda tables, console: note("printed"))
    monkeypatch.setattr(fake, "init", lambda **options: (note("tracked"), real(**options))[1])
    track(tmp_path, "output.run=mine", "output.figures=false")
    assert published == [("printed", True), ("tracked", True)]


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), RuntimeError("no service"), None])
def test_a_tracker_that_does_not_start_is_a_warning(error, fake: FakeWandb, monkeypatch, capsys, tmp_path: Path):
    def refuse(**options: Any) -> None:
        raise error or fake.Error("no answer")

    monkeypatch.setattr(fake, "init", refuse)
    assert (track(tmp_path, "output.figures=false") / "summary.json").exists()
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "tracking.kind=wandb stopped" in line]
    assert str(error or "no answer") in warning


def test_online_without_a_login_is_refused_before_anything_runs(fake: FakeWandb, tmp_path: Path):
    with pytest.raises(ValueError, match=r"^tracking\.mode=online: expected `wandb login` first, or"):
        track(tmp_path, "tracking.mode=online")
    assert not any(tmp_path.iterdir())


def test_a_log_that_cannot_be_written_is_no_news(fake: FakeWandb, monkeypatch, capfd, tmp_path: Path):
    """A full disk once said so in 204 lines of wandb's."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging, "raiseExceptions", True)
    logger, handler = logging.getLogger("of wandb"), logging.StreamHandler(Full())
    logger.addHandler(handler)
    monkeypatch.setattr(fake, "login", lambda prompt: logger.error("a line") or False)
    call_main(monkeypatch, *TOY, *QUIET, f"output.root={tmp_path}")
    logger.removeHandler(handler)
    assert "Logging error" not in capfd.readouterr().err


@pytest.mark.parametrize("method", ["log", "finish", "init"])
def test_a_tracker_that_cannot_write_is_a_warning(method: str, fake: FakeWandb, monkeypatch, capfd, tmp_path: Path):
    """A home that is read-only once hid a finished study."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system", "/home/.local")

    real = fake.init

    def init(**options: Any) -> SimpleNamespace:
        run = real(**options)
        setattr(run, method, refuse)
        return run

    monkeypatch.setattr(fake, "init", refuse if method == "init" else init)
    folder = track(tmp_path, "output.run=mine", "output.figures=false")
    assert (folder / "summary.json").exists()
    assert folder.name == "mine"
    warnings = [line for line in capfd.readouterr().err.splitlines() if "tracking.kind=wandb stopped" in line]
    assert len(warnings) == 1
    assert "Read-only file system" in warnings[0]


@pytest.mark.parametrize(
    ("mode", "logged_in", "used"),
    [("auto", False, "offline"), ("auto", True, "online"), ("offline", True, "offline"), ("online", True, "online")],
)
def test_the_mode(mode: str, logged_in: bool, used: str, monkeypatch, tmp_path: Path):
    fake = FakeWandb(logged_in=logged_in)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    track(tmp_path, "output.figures=false", f"tracking.mode={mode}")
    assert fake.told[0][1]["mode"] == used


def test_an_offline_run_lies_in_the_folder(started, tmp_path: Path):
    online = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR")
    environment = {key: value for key, value in os.environ.items() if key not in online} | {"HOME": str(tmp_path)}
    how = ("tracking.kind=wandb", "tracking.mode=offline", "output.run=mine")
    process = started(tmp_path, "smoke", *TOY, *how, env=environment)
    stderr = process.communicate(timeout=120)[1]
    assert process.returncode == 0, stderr
    (run,) = tmp_path.joinpath("quality", "mine", "wandb").glob("offline-run-*")
    assert list(run.glob("run-*.wandb"))
    assert [path.name for path in tmp_path.joinpath("quality").iterdir() if path.suffix != ".lock"] == ["mine"]


def test_without_tracking_wandb_is_never_imported(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import fails
    track(tmp_path, "tracking=none", "output.figures=false")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_a_character_gets_its_twin(encoding: str, monkeypatch, tmp_path: Path):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    call_main(monkeypatch, *TOY, "tracking=none", "output.figures=false", f"output.root={tmp_path}")
    sys.stdout.flush()
    table = written.getvalue().decode(encoding)
    assert "TTFT = first token - arrival" in table
    assert "?" not in table
    if encoding == "ascii":
        assert "token hit rate = reused / prompt tokens" in table


@pytest.mark.parametrize("stdout", ["full", "closed", "left"])
def test_a_stdout_or_home_that_cannot_be_written_hides_nothing(stdout: str, started, tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    options: dict[str, Any] = {"stdout": open("/dev/full", "w") if stdout == "full" else writing}  # noqa: SIM115
    if stdout == "closed":
        options["preexec_fn"] = lambda: os.close(1)
    options["env"] = os.environ | {"HOME": "/proc/none"}
    tracking = "tracking.kind=wandb" if stdout == "full" else "tracking=none"
    process = started(tmp_path, "smoke", *TOY, tracking, "output.run=mine", **options)
    stderr = process.communicate(timeout=120)[1]
    os.close(writing)
    assert process.returncode == 0, stderr
    assert (tmp_path / "quality" / "mine" / "summary.json").exists()
    assert ("stdout cannot be written" in stderr) == (stdout != "closed")
    assert "Exception" not in stderr
