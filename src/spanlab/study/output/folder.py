"""The folder of one run: written beside the old one, which gives way and is kept when the new one is complete."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console

from spanlab.study.output.config import first_difference
from spanlab.study.progress import say

CONFIG = "config.yaml"
_LONGEST_NAME = 120


def folder_name(words: str) -> str:
    """A run's name as the name of one folder, of at most 120 characters that mean nothing to a shell.

    A list is written as A+B, and overrides are joined by two underscores. A hash ends a name that lost characters.
    """
    lists = re.sub(r"\[([^\[\]]*)\]", lambda found: found[1].replace(", ", "+").replace(",", "+"), words)
    name = lists.replace("/", ":").replace(",", "__")
    safe = re.sub(r"[^\w.=+:@%~-]", "", name)
    if safe == name and len(name) <= _LONGEST_NAME:
        return name
    return f"{safe[: _LONGEST_NAME - 9]}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


class RunFolder:
    """`path` is where the finished run will be; until `finish` everything is written to `work`.

    `if_exists`  replace: start anew, and keep what was there under its time; resume: go on with what a run of the
                 same settings left; fail: refuse if the run exists
    `config`     the resolved settings as YAML; a resumed run must have the same, but for those in `growing`
    """

    def __init__(
        self, root: Path, workload: str, run: str, if_exists: str, config: str, growing: tuple[str, ...] = ()
    ) -> None:
        self.path = root / workload / run
        self.work = root / workload / f".{run}.partial"
        self._old = root / workload / f".{run}.old"
        self._resumes, self._complete = if_exists == "resume", False
        self._lock = _lock(root / workload / f".{run}.lock", run)
        self._settle_old()
        if if_exists == "fail":
            self._refuse_to_replace()
        if self._resumes:
            self._take_up(config, growing)
        else:
            shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        _write_whole(self.work / CONFIG, config)

    def _settle_old(self) -> None:
        """Finish what a process that was killed while it published a run has begun."""
        if self._old.exists() and not self.path.exists():
            os.rename(self._old, self.path)
        elif self._old.exists():
            self._keep_old()

    def _refuse_to_replace(self) -> None:
        run = f"output.run={self.path.name}"
        if self.path.exists():
            raise ValueError(f"{run}: {self.path} exists; expected a new name, or output.if_exists=replace")
        if self.work.exists():
            raise ValueError(f"{run}: {self.work} is unfinished; expected output.if_exists=resume or replace")

    def _take_up(self, config: str, growing: tuple[str, ...]) -> None:
        """Go on from the partial folder, or from a copy of the finished one."""
        if not self.work.exists() and self.path.exists():
            copied = self.work.with_suffix(".copy")
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(self.path, copied)
            os.rename(copied, self.work)
        kept = self.work / CONFIG
        difference = first_difference(kept.read_text(), config, growing) if kept.exists() else ""
        if difference:
            raise ValueError(
                f"output.if_exists=resume: {self.work} was made with other settings ({difference}); "
                "expected the same, or output.if_exists=replace"
            )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._complete:
                self.finish()
        finally:
            self._lock.close()

    def complete(self) -> None:
        """Note that every result is there: from here on the run is published, whatever else fails."""
        self._complete = True

    def finish(self) -> None:
        """Let the new run take the old one's place."""
        self._complete = False
        if self.path.exists():
            os.rename(self.path, self._old)
        os.rename(self.work, self.path)
        if self._resumes:
            shutil.rmtree(self._old, ignore_errors=True)
        elif self._old.exists():
            self._keep_old()

    def _keep_old(self) -> None:
        """Give the run that was replaced its time stamp."""
        told = next(path for path in (self._old / "summary.json", self._old) if path.exists())
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(told.stat().st_mtime))
        names = (f"{self.path.name}.{stamp}{f'_{n}' if n > 1 else ''}" for n in itertools.count(1))
        kept = next(path for path in map(self.path.with_name, names) if not path.exists())
        os.rename(self._old, kept)
        say(Console(stderr=True), f"the run that was there is kept: {kept}")

    def records(self, arm: str) -> Path:
        """The records of one arm."""
        return self.work / "records" / f"{arm}.jsonl"

    def runs(self, arm: str) -> Path:
        """The finished runs of one arm, one line each."""
        return self.work / "runs" / f"{arm}.jsonl"

    @property
    def steps(self) -> Path:
        """The step logs of all arms, where the backend measures steps."""
        return self.work / "steps"


def _lock(path: Path, run: str) -> IO[str]:
    """Hold a run's name for as long as this process lives, so that two runs cannot write one folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"output.run={run}: another process is writing it; expected one at a time, or another name"
        ) from None
    return lock


def _write_whole(path: Path, text: str) -> None:
    """Write beside the file and move there: a full disk leaves no half of it."""
    partial = path.with_suffix(".new")
    partial.write_text(text)
    os.replace(partial, path)
