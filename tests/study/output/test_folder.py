"""One name of a run: after any interruption, finished runs are kept or archived with a message."""

import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spanlab.settings.server import OutputSettings
from spanlab.study import folder as folders
from spanlab.study.folder import RunFolder

STAMPED = re.compile(r"foo\.\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?")
STEPS = 12  # more than any command has
MODES = ("replace", "resume", "fail")


class Killed(BaseException):
    """A process that ends at once: no handler of it runs."""


def disk_full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@dataclass(frozen=True)
class Command:
    """A run of settings A or B; `stop` is the file system step at which it ends, `how` by what."""

    settings: str
    if_exists: str
    stop: int | None = None
    how: Callable[[], BaseException] = Killed


@dataclass
class Name:
    """The folder of one run name, the runs that were finished in it, and the messages about it."""

    root: Path
    messages: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    runs: int = 0

    def execute(self, command: Command, patch: pytest.MonkeyPatch) -> None:
        """Execute a command as its process would: the study ends with it."""
        self.runs += 1
        steps = itertools.count()

        def stop_here() -> None:
            if command.stop is not None and next(steps) == command.stop:
                raise command.how()

        with patch.context() as stopping:
            for module, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree"), (shutil, "copytree")):
                stopping.setattr(module, name, stopped(getattr(module, name), stop_here))
            stopping.setattr(folders, "print_line", lambda console, line: self.messages.append(line))
            self._study(command, f"{command.settings}{self.runs}", stop_here)

    def _study(self, command: Command, number: str, step: Callable[[], None]) -> None:
        folder: RunFolder | None = None
        error: BaseException | None = None
        try:
            folder = RunFolder(
                self.root, "quality", "foo", command.if_exists, f"seed: {command.settings}\narms: {{}}\n"
            )
            step()
            with (folder.work / "lineage").open("a") as file:  # what a resumed run continues
                file.write(f"{number}\n")
            step()
            (folder.work / "summary.json").write_text(number)
            folder.complete()
            step()
            folder.finish()
        except (Killed, OSError, ValueError) as stopped_by:
            error = stopped_by
            error.__traceback__ = None  # its frames hold the lock
        if folder is not None and isinstance(error, Killed):
            folder._lock.close()
        elif folder is not None:
            folder.__exit__(type(error) if error else None, error, None)
        if self.path.exists():
            newest = (self.path / "summary.json").read_text()
            self.finished += [newest] if newest not in self.finished else []

    @property
    def path(self) -> Path:
        return self.root / "quality" / "foo"

    def check(self) -> None:
        """Every finished run is in its folder, is continued there, or is archived with a message."""
        parent = self.path.parent
        kept = [path for path in parent.iterdir() if path.name in ("foo", ".foo.old") or STAMPED.fullmatch(path.name)]
        lineages = " ".join((path / "lineage").read_text() for path in kept).split()
        assert [number for number in self.finished if number not in lineages] == []
        archives = [path for path in kept if STAMPED.fullmatch(path.name)]
        assert sorted(f"the previous run was moved to {path}" for path in archives) == sorted(self.messages)

    def check_settled(self) -> None:
        """Only finished runs remain, each once."""
        entries = {path.name for path in self.path.parent.iterdir()} - {"foo", ".foo.lock"}
        assert [name for name in entries if not STAMPED.fullmatch(name)] == []
        summaries = [path.joinpath("summary.json").read_text() for path in self.path.parent.glob("foo*")]
        assert len(set(summaries)) == len(summaries)


def stopped(function: Callable[..., object], stop: Callable[[], None]) -> Callable[..., object]:
    """The function, which may end before it does anything; a deletion may end halfway."""

    def call(*arguments, **options):
        if function is shutil_rmtree and Path(arguments[0]).exists():
            (Path(arguments[0]) / "summary.json").unlink(missing_ok=True)
        stop()
        return function(*arguments, **options)

    return call


shutil_rmtree = shutil.rmtree


def interrupted() -> Iterator[Command]:
    """Every command, without and with a stop at every step."""
    for settings, mode in itertools.product("AB", MODES):
        yield Command(settings, mode)
        for stop, how in itertools.product(range(STEPS), (Killed, disk_full)):
            yield Command(settings, mode, stop, how)


def check_all(sequences: Iterator[tuple[Command, ...]], root: Path, patch: pytest.MonkeyPatch) -> None:
    for index, sequence in enumerate(sequences):
        name = Name(root / str(index))
        for command in (Command("A", "replace"), *sequence, Command("B", "replace")):
            name.execute(command, patch)
            name.check()
        name.check_settled()
        shutil.rmtree(name.root)


def test_no_order_of_commands_loses_a_finished_run(tmp_path: Path, monkeypatch):
    last = [Command(settings, mode) for settings, mode in itertools.product("AB", ("replace", "resume"))]
    check_all(itertools.product(interrupted(), last), tmp_path, monkeypatch)


@pytest.mark.slow
def test_no_two_interrupted_commands_lose_a_finished_run(tmp_path: Path, monkeypatch):
    orders = itertools.product(interrupted(), interrupted(), [Command("A", "resume"), Command("B", "resume")])
    check_all(itertools.islice(orders, 0, None, 7), tmp_path, monkeypatch)


def test_resumed_copy_replaces_its_run_without_an_archive(tmp_path: Path, monkeypatch):
    name = Name(tmp_path)
    for mode in ("replace", "resume", "resume"):
        name.execute(Command("A", mode), monkeypatch)
    assert (name.path / "lineage").read_text().split() == ["A1", "A2", "A3"]
    assert name.messages == []
    name.execute(Command("B", "replace", stop=2), monkeypatch)  # killed with a part of its results
    name.execute(Command("B", "resume"), monkeypatch)
    (archive,) = name.path.parent.glob("foo.*")
    assert (archive / "lineage").read_text().split() == ["A1", "A2", "A3"]
    assert (name.path / "lineage").read_text().split()[-1] == "B5"
    assert name.messages == [f"the previous run was moved to {archive}"]


def test_other_settings_are_refused_before_anything_is_copied(tmp_path: Path, monkeypatch):
    name = Name(tmp_path)
    name.execute(Command("A", "replace"), monkeypatch)
    with pytest.raises(ValueError, match=r"foo has other settings \(seed: A there, seed: B now\)"):
        RunFolder(tmp_path, "quality", "foo", "resume", "seed: B\narms: {}\n")
    assert sorted(path.name for path in name.path.parent.iterdir()) == [".foo.lock", "foo"]


@pytest.mark.parametrize("link", [".foo.lock", ".foo.partial", ".foo.old", ".foo.scratch", "foo"])
def test_symbolic_links_are_refused_and_not_followed(link: str, tmp_path: Path):
    (tmp_path / "quality").mkdir()
    target = tmp_path / "target"
    if link == ".foo.lock":
        target.write_text("precious")
    else:
        target.mkdir()
    (tmp_path / "quality" / link).symlink_to(target)
    with pytest.raises(ValueError, match=rf"^output.run=foo: .*/{re.escape(link)} is a symbolic link; expected"):
        RunFolder(tmp_path, "quality", "foo", "replace", "")
    assert target.read_text() == "precious" if link == ".foo.lock" else list(target.iterdir()) == []


@pytest.mark.parametrize("run", ["-rf", ".hidden", ".", "..", "a/b"])
def test_names_that_hide_or_look_like_options_are_refused(run: str):
    with pytest.raises(ValueError, match=rf"^output.run={re.escape(run)}: expected the name of one folder"):
        OutputSettings(run=run)
