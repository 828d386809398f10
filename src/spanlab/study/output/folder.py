"""The folder of one run: a new run is written to a partial folder, and replaces the old run when it is complete."""

from __future__ import annotations

import errno
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

from spanlab.study.output.arm_files import replace_file
from spanlab.study.output.config import first_difference
from spanlab.study.progress import print_line

CONFIG, SUMMARY = "config.yaml", "summary.json"
#: Said of a run that an error ended after its results: `spanlab.load(RUN).report` and the closing sentence.
REPORT, UNFINISHED = "report", "unfinished"  # key of `summary.json` and its value in such a run
UNFINISHED_REPORT = "has all results, but its figures or its report are unfinished: output.if_exists=resume goes on"
_COPIED = ".copied"  # in a partial folder that was copied from a finished run: the identity of that run
_LONGEST_NAME = 120


def folder_name(text: str) -> str:
    """Folder name of a run: at most 120 characters, none of them special in a shell.

    A list becomes A+B, and overrides are joined by two underscores. A name that lost characters ends in a hash.
    """
    lists = re.sub(r"\[([^\[\]]*)\]", lambda match: match[1].replace(", ", "+").replace(",", "+"), text)
    name = lists.replace("/", ":").replace(",", "__")
    safe = re.sub(r"[^\w.=+:@%~-]", "", name)
    if safe == name and len(name) <= _LONGEST_NAME:
        return name
    return f"{safe[: _LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class RunFolder:
    """Run folder: `path` is the folder of the finished run; all files are written to `work` until `finish`.

    `if_exists`  replace: start a new run, and rename the old one by its time stamp; resume: continue a run with the
                 same settings; fail: raise if the run exists
    `config`     the resolved settings as YAML; a resumed run must have the same, except for those in `growing`

    A finished run is deleted only if the new run continued a copy of it; any other is renamed by its time stamp. Each
    step is one rename, so that the next process completes what a killed one began.
    """

    def __init__(
        self, root: Path, workload: str, run: str, if_exists: str, config: str, growing: tuple[str, ...] = ()
    ) -> None:
        folder = root / workload
        self.path, self.work = folder / run, folder / f".{run}.partial"
        self._old, self._scratch = folder / f".{run}.old", folder / f".{run}.scratch"
        self._complete = False
        self._lock = _lock(folder / f".{run}.lock", run)
        self._refuse_links()
        self._recover()
        check_names(root, workload, run, if_exists, config, growing)
        if if_exists == "resume":
            self._resume()
        else:
            self._discard(self.work)
        self.work.mkdir(parents=True, exist_ok=True)
        replace_file(self.work / CONFIG, config.encode())

    def _refuse_links(self) -> None:
        """Raise where a name of this class is a symbolic link, which would lead its files to another place."""
        for path in (self.path, self.work, self._old, self._scratch):
            if path.is_symlink():
                raise _link_error(path, self.path.name)

    def _recover(self) -> None:
        """Complete the renames of a process that was killed in `finish`."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._old.exists():
            if not self.path.exists():
                os.rename(self.work if self.work.exists() else self._old, self.path)
            self._settle_old()

    def _resume(self) -> None:
        """Continue from the partial folder, or from a copy of the finished one."""
        if self.path.exists() and not self.work.exists():
            shutil.copytree(self.path, self._scratch)
            (self._scratch / _COPIED).write_text(_identity(self.path))
            os.rename(self._scratch, self.work)

    def _discard(self, folder: Path) -> None:
        """Delete a folder; a process that is killed meanwhile leaves no part of it under its name."""
        if folder.exists():
            os.rename(folder, self._scratch)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._complete:
                self.finish()
                if error is not None:
                    error.add_note(f"{self.path} {UNFINISHED_REPORT}")
            elif error is not None:
                self._recover()  # after an error between the renames of `finish`
        finally:
            self._lock.close()

    def complete(self) -> None:
        """Mark all results as written: from here on, leaving the block publishes the run even after an error."""
        self._complete = True

    def finish(self) -> None:
        """Replace the old run by the new one."""
        self._complete = False
        for path in sorted(self.work.rglob(".*")):  # temporary files of a killed process
            if path.is_file() and path.name != _COPIED:
                path.unlink()
        if self.path.exists():
            os.rename(self.path, self._old)
        os.rename(self.work, self.path)
        self._settle_old()

    def _settle_old(self) -> None:
        """Delete the replaced run if the new one continued a copy of it, else rename it by its time stamp."""
        mark = self.path / _COPIED
        if self._old.exists() and mark.exists() and mark.read_text() == _identity(self._old):
            self._discard(self._old)
        elif self._old.exists():
            self._archive_old()
        mark.unlink(missing_ok=True)

    def _archive_old(self) -> None:
        """Rename the replaced run by its time stamp."""
        source = next(path for path in (self._old / SUMMARY, self._old) if path.exists())
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(source.stat().st_mtime))
        names = (f"{self.path.name}.{stamp}{f'_{n}' if n > 1 else ''}" for n in itertools.count(1))
        target = next(path for path in map(self.path.with_name, names) if not path.exists())
        os.rename(self._old, target)
        print_line(Console(stderr=True), f"the previous run was moved to {target}")


def check_names(
    root: Path, workload: str, run: str, if_exists: str, config: str, growing: tuple[str, ...] = ()
) -> None:
    """Raise what `RunFolder` raises for runs of this name that exist, or for a root that is no folder; writes nothing.

    Arguments are those of `RunFolder`.
    """
    folder = root / workload
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    path, work = folder / run, folder / f".{run}.partial"
    if if_exists == "fail" and path.exists():
        raise ValueError(f"output.run={run}: {path} exists; expected a new name, or output.if_exists=replace")
    if if_exists == "fail" and work.exists():
        raise ValueError(f"output.run={run}: {work} is unfinished; expected output.if_exists=resume or replace")
    source = work if work.exists() else path
    if if_exists != "resume" or not (source / CONFIG).exists():
        return
    difference = first_difference((source / CONFIG).read_text(), config, growing)
    if difference:
        raise ValueError(
            f"output.if_exists=resume: {source} has other settings ({difference}); "
            "expected the same, or output.if_exists=replace"
        )


def _identity(folder: Path) -> str:
    """A text that a folder keeps when it is renamed."""
    status = folder.stat()
    return f"{status.st_dev} {status.st_ino}"


def _link_error(path: Path, run: str) -> ValueError:
    return ValueError(f"output.run={run}: {path} is a symbolic link; expected no link, or another name")


def _lock(path: Path, run: str) -> IO[str]:
    """Lock a run's name until the file is closed, so that two processes cannot write one folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # a link of another user would lead to any file
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "w")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _link_error(path, run) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"output.run={run}: another process is writing it; expected one at a time, or another name"
        ) from None
    return lock
