"""A finished run is never lost: it stays in place, is archived, or is part of the run that continues it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest

from spanlab.main import compose
from spanlab.study.output import folder as module
from spanlab.study.output.folder import RunFolder

IDS = "summary.json"


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_at(step: int | None) -> Iterator[Callable[[], int]]:
    """Kill the process before its change of the file system of this number; give the number of changes made."""
    made = count()
    done = [0]

    def counted(change: Callable[..., Any], halfway: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            done[0] = next(made) + 1
            if done[0] - 1 == step:
                halfway(*args)
                raise Killed
            return change(*args, **options)

        return changed

    def lose_one(path: Path, *_: Any) -> None:
        (Path(path) / IDS).unlink(missing_ok=True)

    def copy_one(source: Path, target: Path) -> None:
        Path(target).mkdir()
        shutil.copy(Path(source) / "config.yaml", target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.os, "rename", counted(os.rename, lambda *_: None))
        patch.setattr(module.shutil, "rmtree", counted(shutil.rmtree, lose_one))
        patch.setattr(module.shutil, "copytree", counted(shutil.copytree, copy_one))
        yield lambda: done[0]


def ids_of(path: Path) -> set[str]:
    """Numbers of the runs whose results a folder holds."""
    return set((path / IDS).read_text().split()) if (path / IDS).exists() else set()


def run(root: Path, seeds: int, mode: str, number: int, *, ends: bool) -> None:
    """One command: a run with these settings that finishes or is interrupted."""
    with RunFolder(root, "quality", "foo", mode, f"seeds: [{seeds}]\n") as folder:
        (folder.work / IDS).write_text(" ".join({*ids_of(folder.work), str(number)}))
        if not ends:
            raise Killed
        folder.complete()


def published(root: Path) -> set[str]:
    """Numbers of the runs in folders that a user sees."""
    return set().union(*(ids_of(path) for path in (root / "quality").glob("foo*")))


COMMANDS = list(product((0, 1), ("replace", "resume", "fail"), (True, False)))


def attempt(root: Path, command: tuple[int, str, bool], number: int, step: int | None = None) -> int:
    """Run a command, killed at a step; return the number of changes that it made."""
    seeds, mode, ends = command
    with killed_at(step) as changes, suppress(Killed, ValueError):
        run(root, seeds, mode, number, ends=ends)
    return changes()


def check_orders(root: Path, length: int) -> int:
    """Try every order of commands, the last but one killed at each of its changes; return the number of orders."""
    orders = 0
    for number, commands in enumerate(product(COMMANDS, repeat=length)):
        steps = 99
        for step in range(99):
            if step > steps:
                break
            orders += 1
            folder = root / f"{number}_{step}"
            for index, command in enumerate(commands[:-2]):
                attempt(folder, command, index)
            before = published(folder) if folder.exists() else set()
            steps = attempt(folder, commands[-2], length - 2, step)
            after = published(folder) | set().union(*(ids_of(path) for path in (folder / "quality").glob(".foo*")))
            assert before <= after, (commands, step)
            before |= published(folder)
            attempt(folder, commands[-1], length - 1)
            assert before <= published(folder), (commands, step)
            shutil.rmtree(folder)
    return orders


def test_no_order_of_three_commands_loses_a_run(tmp_path: Path):
    assert check_orders(tmp_path, 3) > 2000


@pytest.mark.slow
def test_no_order_of_four_commands_loses_a_run(tmp_path: Path):
    assert check_orders(tmp_path, 4) > 30000


def test_interrupted_run_of_other_settings_archives_the_finished_one(tmp_path: Path, capsys):
    run(tmp_path, 0, "replace", 0, ends=True)
    with suppress(Killed):
        run(tmp_path, 1, "replace", 1, ends=False)
    run(tmp_path, 1, "resume", 2, ends=True)
    assert ids_of(tmp_path / "quality" / "foo") == {"1", "2"}
    (archived,) = (tmp_path / "quality").glob("foo.*")
    assert ids_of(archived) == {"0"}
    assert f"the previous run was moved to {archived}" in capsys.readouterr().err.replace("\n", "")


def test_resumed_copy_replaces_its_run_without_an_archive(tmp_path: Path):
    run(tmp_path, 0, "replace", 0, ends=True)
    run(tmp_path, 0, "resume", 1, ends=True)
    assert [path.name for path in (tmp_path / "quality").glob("foo*")] == ["foo"]
    assert {path.name for path in (tmp_path / "quality" / "foo").iterdir()} == {"config.yaml", IDS}


def test_symbolic_links_are_refused_and_their_targets_kept(tmp_path: Path):
    (tmp_path / "quality").mkdir()
    (tmp_path / "mine").write_text("precious")
    for name in (".foo.lock", ".foo.partial", "foo"):
        link = tmp_path / "quality" / name
        link.symlink_to(tmp_path / "mine")
        with pytest.raises(ValueError, match=rf"^output\.run=foo: {link} is a symbolic link; expected"):
            run(tmp_path, 0, "replace", 0, ends=True)
        link.unlink()
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("name", ["-rf", ".hidden", "..", "a/b"])
def test_names_of_other_folders_are_refused(name: str):
    with pytest.raises(ValueError, match=r"^output\.run=.*: expected the name of one folder"):
        compose("smoke", [f"output.run='{name}'"])
