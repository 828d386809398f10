"""Files damaged by a crash or a full disk are named and computed again."""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spanlab.study import worker

from .conftest import FILES, RESUME


def garble(path: Path) -> None:
    """Break a line in the middle."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"seed"' + lines[2][8:]
    path.write_bytes(b"".join(lines))


def zero(path: Path) -> None:
    """Write zeros where a crash of the machine leaves them."""
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(50) + data[150:])


def double(path: Path) -> None:
    """Write one line twice."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[1], *lines[2:]]))


def cut(path: Path) -> None:
    """Lose the last line."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("break_file", [garble, zero, double, cut, Path.unlink])
def test_an_arm_with_corrupt_records_is_named_and_computed_again(break_file, toy, files_of, capsys):
    folder = toy("only=[none,dp_3]")
    before = files_of(folder)
    break_file(folder / "records" / "dp_3.jsonl")
    capsys.readouterr()
    again = toy("only=[none,dp_3]", RESUME)
    assert files_of(again) == before
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "files are corrupt" in line]
    assert message.startswith("arms.dp_3 is recomputed because its files are corrupt: ")
    assert f"{folder.with_name('.mine.partial')}/records/dp_3.jsonl: " in message


def test_a_corrupt_line_of_a_finished_cell_is_named(toy, files_of, capsys):
    folder = toy("only=[none]")
    before = files_of(folder)
    zero(folder / "runs" / "none.jsonl")
    assert files_of(toy("only=[none]", RESUME)) == before
    assert "runs/none.jsonl: " in capsys.readouterr().err


def test_a_config_that_was_half_written_stops_no_resume(toy, monkeypatch):
    def half(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="No space left"):
            toy("only=[none]")
    folder = toy("only=[none]", RESUME)
    assert {path.name for path in folder.iterdir()} == FILES


def test_runs_that_are_deleted_midway_are_a_sentence(toy, monkeypatch):
    run_arm = worker.run_arm

    def deleting(runtime: Any, task: Any, progress: Any) -> Iterator[None]:
        yield from run_arm(runtime, task, progress)
        task.files.runs.unlink()

    monkeypatch.setattr(worker, "run_arm", deleting)
    with pytest.raises(ValueError, match=r"none\.jsonl lacks \d+ of \d+ finished runs; expected a folder that nothing"):
        toy("only=[none]")
