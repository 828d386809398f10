"""The folder of one run: written beside the old one, which gives way only when the new one is complete."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

CONFIG = "config.yaml"
_LONGEST_NAME = 120


def folder_name(words: str) -> str:
    """A run's name as the name of one folder, cut to 120 characters; a hash keeps cut names apart."""
    name = words.replace("/", ":")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class RunFolder:
    """`path` is where the finished run will be; until `finish` everything is written to `work`.

    `if_exists`  replace: start anew; resume: go on with what an interrupted run of the same settings left;
                 fail: refuse if the run exists
    `config`     the resolved settings as YAML; a resumed run must have the same
    """

    def __init__(self, root: Path, workload: str, run: str, if_exists: str, config: str) -> None:
        self.path = root / workload / run
        self.work = root / workload / f".{run}.partial"
        self._lock = _lock(root / workload / f".{run}.lock", run)
        old = self._old()
        if old.exists() and not self.path.exists():  # killed while one took the other's place
            os.rename(old, self.path)
        if if_exists == "fail" and self.path.exists():
            raise ValueError(f"output.run={run}: {self.path} exists; expected a new name, or output.if_exists=replace")
        if if_exists == "fail" and self.work.exists():
            raise ValueError(
                f"output.run={run}: {self.work} is unfinished; expected output.if_exists=resume or replace"
            )
        if if_exists == "resume":
            self._take_up(config)
        else:
            shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / CONFIG).write_text(config)

    def _take_up(self, config: str) -> None:
        """Go on from the partial folder, or from a copy of the finished one."""
        if not self.work.exists() and self.path.exists():
            shutil.copytree(self.path, self.work)
        kept = self.work / CONFIG
        if kept.exists() and kept.read_text() != config:
            raise ValueError(
                f"output.if_exists=resume: {self.work} was made with other settings "
                f"({_first_difference(kept.read_text(), config)}); expected the same, or output.if_exists=replace"
            )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def finish(self) -> None:
        """Let the new run take the old one's place."""
        old = self._old()
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            os.rename(self.path, old)
        os.rename(self.work, self.path)
        shutil.rmtree(old, ignore_errors=True)

    def _old(self) -> Path:
        return self.path.with_name(f".{self.path.name}.old")

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


def _first_difference(old: str, new: str) -> str:
    def unequal() -> Iterator[str]:
        for a, b in zip(old.splitlines(), new.splitlines(), strict=False):
            if a != b:
                yield f"{a.strip()} there, {b.strip()} now"

    return next(unequal(), "one has more lines")
