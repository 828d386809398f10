"""The entry `first_light`: run stages as separate commands, and write a folder of results to
commit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
from rich.console import Console

from spanlab.compiled import HOME
from spanlab.provenance import commit, machine
from spanlab.registry import REQUIRED, entry, one_of, positive
from spanlab.report.table import Cell, Column, Table, markdown
from spanlab.settings.server import OutputSettings
from spanlab.study.folder import print_line, slug

PROGRAMS = ("spanlab", "python", "bash")


@dataclass
class Stage:
    """One command, and the files to keep of its output.

    `command`  a program (spanlab, python or bash) and its arguments; {out} is the stage's folder
    `minutes`  time limit
    `keep`     glob patterns of files below the stage's folder that are copied beside the log
    """

    command: list[str] = REQUIRED
    minutes: float = REQUIRED
    keep: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("command", self.command[0] if self.command else "", PROGRAMS)
        positive("minutes", self.minutes)


@dataclass
class FirstLight:
    """Run all stages for a new GPU in order, report the stages that fail, and skip finished ones on
    resume.

    `stages`         commands by name, in order; one of the group `stages`
    `only`           names of the stages to run; empty: all
    `engine_device`  cuda or cpu
    `pic_model`      model of calibration and of `pic_bench`, with random weights
    `prefill`        `engine.prefill` of the studies with random weights
    `answers_model`  hub name of the model that answers, with trained weights
    `minutes`        time limit of all stages together; later stages do not start
    `name`           folder of the results; null: the name of the card
    `cards`          folder of all cards; relative to the repository
    `output`         output folder of the stages; resume continues after finished stages, replace
                     starts again
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    engine_device: str = "cuda"
    pic_model: str = "llama-3.1-8b"
    prefill: str = "graphs"
    answers_model: str = "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    minutes: float = 60.0
    name: str | None = None
    cards: str = "benchmarks/cards"
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        one_of("engine_device", self.engine_device, ("cuda", "cpu"))
        one_of("output.if_exists", self.output.if_exists, ("resume", "replace"))
        positive("minutes", self.minutes)
        for name in self.only:
            one_of("only", name, tuple(self.stages))
        if self.name is not None and ("/" in self.name or self.name in ("", ".", "..")):
            raise ValueError(f"name={self.name}: expected the name of one folder")

    @property
    def chosen(self) -> dict[str, Stage]:
        """The stages that run, in order."""
        return {
            name: stage for name, stage in self.stages.items() if not self.only or name in self.only
        }


DONE, FAILED, LATE = "done", "failed", "left out: no time"
STATE = "stages.json"
LOG = "log.txt"
_PROGRAMS = {
    "spanlab": [sys.executable, "-c", "from spanlab.cli import main; main()"],
    "python": [sys.executable],
    "bash": ["bash"],
}
_LOG_LINES = 400  # last lines of a log that are copied
_COLUMNS = (
    Column("stage", "stage", left=True),
    Column("status", "status", left=True),
    *(Column("minutes", "minutes"), Column("budget_minutes", "budget")),
    Column("commit", "commit", left=True),
    Column("command", "command", left=True),
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a stage.

    `status`   done, failed with the reason, or left out
    `seconds`  duration
    """

    status: str
    seconds: float
    commit: str
    command: list[str]


@entry("first_light", FirstLight, environment="engine", resumes=True)
def _run_entry(settings: FirstLight, run: str, root: Path) -> bool:
    return run_first_light(settings, HOME)


def run_first_light(settings: FirstLight, home: Path) -> bool:
    """Run the stages that are not done; return whether all stages are done."""
    name = settings.name or slug(card_name(settings.engine_device))
    work, card = home / settings.output.root / "first_light" / name, home / settings.cards / name
    if settings.output.if_exists == "replace":
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    saved = orjson.loads((work / STATE).read_bytes()) if (work / STATE).exists() else {}
    state = {stage: Outcome(**fields) for stage, fields in saved.items()}
    started = time.monotonic()
    for stage, stage_settings in settings.chosen.items():
        outcome = state.get(stage)
        if (
            outcome is not None
            and outcome.status == DONE
            and outcome.command == stage_settings.command
        ):
            _print(f"{stage}: already done")
            continue
        if outcome is None or outcome.command != stage_settings.command:
            # a failed stage with the same command resumes
            shutil.rmtree(work / stage, ignore_errors=True)
        remaining_s = settings.minutes * 60 - (time.monotonic() - started)
        state[stage] = _run(stage, stage_settings, work / stage, home, remaining_s)
        (work / STATE).write_bytes(
            orjson.dumps({stage_name: asdict(state[stage_name]) for stage_name in state})
        )
        _copy_results(work / stage, card / stage, stage_settings.keep, home)
        _write_card(card, name, settings, state)
    return all(state[stage].status == DONE for stage in settings.chosen)


def card_name(device: str) -> str:
    """Name of the card, or of this machine's processors; no CUDA context is created."""
    if device == "cpu":
        return machine()
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ValueError(
            "engine_device=cuda: expected a card that nvidia-smi names, or name=NAME"
        ) from error


def _run(name: str, stage: Stage, folder: Path, home: Path, remaining_s: float) -> Outcome:
    """Run one stage in its folder, within its time limit and the remaining time of all stages."""
    limit_s, at_commit = min(stage.minutes * 60, remaining_s), commit()
    if limit_s <= 0:
        _print(f"{name}: {LATE}")
        return Outcome(LATE, 0.0, at_commit, stage.command)
    _print(f"{name}: at most {limit_s / 60:.1f} minutes, {' '.join(stage.command)}")
    folder.mkdir(parents=True, exist_ok=True)
    command = _PROGRAMS[stage.command[0]] + [
        word.replace("{out}", str(folder)) for word in stage.command[1:]
    ]
    started = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command, cwd=home, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            status = DONE if code == 0 else f"{FAILED}: exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"{FAILED}: took longer than {limit_s / 60:.1f} minutes"
        finally:  # at the time limit, or on an interrupt
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - started
    _print(f"{name}: {status} after {seconds / 60:.1f} minutes")
    return Outcome(status, round(seconds, 1), at_commit, stage.command)


def _copy_results(folder: Path, card: Path, patterns: list[str], home: Path) -> None:
    """Copy the results to commit, without paths of this machine."""
    shutil.rmtree(card, ignore_errors=True)
    names = {str(folder): "{out}", str(home): ".", sys.prefix: "{python}", str(Path.home()): "~"}
    for pattern in (LOG, *patterns):
        for path in sorted(folder.glob(pattern)):
            target = card / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(errors="replace")
            if path.name == LOG:
                text = "\n".join(text.splitlines()[-_LOG_LINES:]) + "\n"
            for folder_of_machine, name in names.items():
                text = text.replace(folder_of_machine, name)
            target.write_text(text)


def _write_card(card: Path, name: str, settings: FirstLight, state: Mapping[str, Outcome]) -> None:
    """Write the page and the data of a card; called after each stage."""
    rows = []
    for stage, stage_settings in settings.stages.items():
        outcome = state.get(stage)
        if outcome is not None:
            minutes, command = outcome.seconds / 60, " ".join(outcome.command)
            rows.append(
                (Cell(stage, stage), Cell(outcome.status, outcome.status), Cell(minutes, f"{minutes:.1f}"),
                 Cell(stage_settings.minutes, f"{stage_settings.minutes:g}"),
                 Cell(outcome.commit, outcome.commit), Cell(command, command))
            )  # fmt: skip
    table = Table("stages", "Stages", _COLUMNS, tuple(rows))
    facts = {
        "card": name,
        "device": settings.engine_device,
        "stages": {stage: asdict(state[stage]) for stage in state},
    }
    (card / "card.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
    lines = [
        f"# First light on {name}\n",
        "Made by `bash runall.sh -cn first_light`; each folder holds what its stage left, with the end of its log.\n",
        markdown(table),
    ]
    (card / "README.md").write_text("\n".join(lines))


def _print(text: str) -> None:
    print_line(Console(stderr=True), text)
