"""The entry `first_light`: runs its stages as commands of their own, and leaves a folder that is ready to commit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from rich.console import Console

from spanlab.report import faces
from spanlab.report.tables import Cell, Column, Table
from spanlab.settings.first_light import FirstLight, Stage
from spanlab.study.fidelity.profiles import slug
from spanlab.study.output import provenance
from spanlab.study.progress import say

DONE, FAILED, LATE = "done", "failed", "left out: no time"
STATE = "stages.json"
LOG = "log.txt"
_PROGRAMS = {
    "spanlab": [sys.executable, "-c", "from spanlab.main import main; main()"],
    "python": [sys.executable],
    "bash": ["bash"],
}
_KEPT_LINES = 400  # of a log
_COLUMNS = (
    Column("stage", "stage", left=True),
    Column("status", "status", left=True),
    *(Column("minutes", "minutes"), Column("budget_minutes", "budget")),
    Column("commit", "commit", left=True),
    Column("command", "command", left=True),
)


@dataclass(frozen=True)
class Outcome:
    """How a stage ended.

    `status`   done, failed and why, or left out
    `seconds`  that it took
    """

    status: str
    seconds: float
    commit: str
    command: list[str]


def run_first_light(settings: FirstLight, home: Path) -> bool:
    """Run the stages that are not done yet; whether all of them are now."""
    name = settings.name or slug(card_name(settings.engine_device))
    work, card = home / settings.output.root / "first_light" / name, home / settings.cards / name
    if settings.output.if_exists == "replace":
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    state, began = _read(work / STATE), time.monotonic()
    for stage, told in settings.chosen.items():
        known = state.get(stage)
        if known is not None and known.status == DONE and known.command == told.command:
            _say(f"{stage}: done before")
            continue
        if known is None or known.command != told.command:
            shutil.rmtree(work / stage, ignore_errors=True)  # else a failed stage goes on from what it left
        left = settings.minutes * 60 - (time.monotonic() - began)
        state[stage] = _run(stage, told, work / stage, home, left)
        (work / STATE).write_bytes(orjson.dumps({each: asdict(state[each]) for each in state}))
        _keep(work / stage, card / stage, told.keep, home)
        _write_card(card, name, settings, state)
    return all(state[stage].status == DONE for stage in settings.chosen)


def card_name(device: str) -> str:
    """The name of the card, or of this machine's processors; nothing is opened on the card."""
    if device == "cpu":
        return provenance.machine()
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise ValueError("engine_device=cuda: expected a card that nvidia-smi names, or name=NAME") from error


def _run(name: str, stage: Stage, folder: Path, home: Path, left: float) -> Outcome:
    """Run one stage in its folder, for as long as it and all may take."""
    limit, commit = min(stage.minutes * 60, left), provenance.commit()
    if limit <= 0:
        _say(f"{name}: {LATE}")
        return Outcome(LATE, 0.0, commit, stage.command)
    _say(f"{name}: at most {limit / 60:.1f} minutes, {' '.join(stage.command)}")
    folder.mkdir(parents=True, exist_ok=True)
    command = _PROGRAMS[stage.command[0]] + [word.replace("{out}", str(folder)) for word in stage.command[1:]]
    began = time.monotonic()
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(command, cwd=home, stdout=log, stderr=log, start_new_session=True)
        status = _ended(process, limit)
    seconds = time.monotonic() - began
    _say(f"{name}: {status} after {seconds / 60:.1f} minutes")
    return Outcome(status, round(seconds, 1), commit, stage.command)


def _ended(process: subprocess.Popen[bytes], limit: float) -> str:
    """Wait for a process and what it started; end them where they take too long, or where we are interrupted."""
    try:
        code = process.wait(limit)
        return DONE if code == 0 else f"{FAILED}: exit code {code}"
    except subprocess.TimeoutExpired:
        return f"{FAILED}: took longer than {limit / 60:.1f} minutes"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _keep(folder: Path, card: Path, patterns: list[str], home: Path) -> None:
    """Copy what is worth a commit, with no path of this machine in it."""
    shutil.rmtree(card, ignore_errors=True)
    for pattern in (LOG, *patterns):
        for path in sorted(folder.glob(pattern)):
            target = card / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_without_paths(_end_of(path), folder, home))


def _end_of(path: Path) -> str:
    """The text of a file; of a log its last lines."""
    text = path.read_text(errors="replace")
    return text if path.name != LOG else "\n".join(text.splitlines()[-_KEPT_LINES:]) + "\n"


def _without_paths(text: str, folder: Path, home: Path) -> str:
    places = {str(folder): "{out}", str(home): ".", sys.prefix: "{python}", str(Path.home()): "~"}
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def _write_card(card: Path, name: str, settings: FirstLight, state: Mapping[str, Outcome]) -> None:
    """The page and the data of a card, anew after each stage."""
    table = _table(settings, state)
    facts = {"card": name, "device": settings.engine_device, "stages": {stage: asdict(state[stage]) for stage in state}}
    (card / "card.json").write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2) + b"\n")
    lines = [
        f"# First light on {name}\n",
        "Made by `bash runall.sh -cn first_light`; each folder holds what its stage left, with the end of its log.\n",
        faces.markdown(table),
    ]
    (card / "README.md").write_text("\n".join(lines))


def _table(settings: FirstLight, state: Mapping[str, Outcome]) -> Table:
    rows = []
    for stage, told in settings.stages.items():
        outcome = state.get(stage)
        if outcome is not None:
            minutes, command = outcome.seconds / 60, " ".join(outcome.command)
            rows.append(
                (Cell(stage, stage), Cell(outcome.status, outcome.status), Cell(minutes, f"{minutes:.1f}"),
                 Cell(told.minutes, f"{told.minutes:g}"), Cell(outcome.commit, outcome.commit), Cell(command, command))
            )  # fmt: skip
    return Table("stages", "Stages", _COLUMNS, tuple(rows))


def _read(path: Path) -> dict[str, Outcome]:
    """What is known of stages that ran before."""
    if not path.exists():
        return {}
    return {stage: Outcome(**known) for stage, known in orjson.loads(path.read_bytes()).items()}


def _say(words: str) -> None:
    say(Console(stderr=True), words)
