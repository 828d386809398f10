"""The golden set is repeatable, and its comparison sees one changed byte."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def _run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_comparison_names_a_changed_byte(tmp_path: Path):
    for name in ("old", "new"):
        done = _run("measure.py", tmp_path / name, "--only", "messages")
        assert done.returncode == 0, done.stderr
    done = _run("compare.py", tmp_path / "old", tmp_path / "new")
    assert (done.returncode, done.stdout) == (0, "0 of 1 files differ\n")
    changed = tmp_path / "new" / "messages" / "messages.txt"
    changed.write_text(changed.read_text().replace("expected", "wanted", 1))
    done = _run("compare.py", tmp_path / "old", tmp_path / "new")
    assert done.returncode == 1
    assert done.stdout.startswith("messages/messages.txt: line ")


def test_a_deliberate_change_is_listed(tmp_path: Path):
    for name, text in (("old", "one two"), ("new", "one three")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(text)
    renamed = tmp_path / "renamed.json"
    renamed.write_text('{"two": "three"}')
    assert _run("compare.py", tmp_path / "old", tmp_path / "new").returncode == 1
    assert _run("compare.py", tmp_path / "old", tmp_path / "new", "--renamed", renamed).returncode == 0


def test_an_unknown_part_is_refused(tmp_path: Path):
    done = _run("measure.py", tmp_path, "--only", "nothing")
    assert done.returncode == 1
    assert "--only=['nothing']: expected some of smoke, " in done.stderr


def test_an_empty_set_is_no_golden_set(tmp_path: Path):
    done = _run("compare.py", tmp_path, tmp_path / "nowhere")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path}: expected a golden set, there is no file\n"
