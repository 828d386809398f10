"""A disk that fills up while records are written: one sentence, and the old results stay."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

STUDY = ("-cn", "smoke", "output.run=kept", "output.figures=false", "tracking.kind=none", "workers=2", "seeds=[0,1,2]")
SMALL = ("workload.documents=1", "workload.questions_per_document=2", "only=[none]")
SIZE = 128 << 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_gets_a_sentence_and_the_old_run_stays(small_disk, console, one_sentence, bytes_below, spanlab):
    assert spanlab(*STUDY, *SMALL, f"output.root={small_disk}").code == 0
    before = bytes_below(small_disk / "quality" / "kept")
    one_sentence(console(*STUDY, f"output.root={small_disk}"), "output.root: the disk is full", "expected room")
    assert bytes_below(small_disk / "quality" / "kept") == before


@pytest.mark.slow
def test_a_run_resumes_after_a_full_disk(small_disk, console, bytes_below, tmp_path: Path):
    assert console(*STUDY, f"output.root={small_disk}").code == 1
    left = small_disk / "quality" / ".kept.partial"
    moved = tmp_path / "room" / "quality" / left.name
    moved.parent.mkdir(parents=True)
    shutil.copytree(left, moved)
    assert console(*STUDY, f"output.root={tmp_path / 'room'}", "output.if_exists=resume").code == 0
    assert console(*STUDY, f"output.root={tmp_path / 'whole'}").code == 0
    resumed, whole = (bytes_below(tmp_path / name / "quality" / "kept") for name in ("room", "whole"))
    assert {name for name in resumed if resumed[name] != whole[name]} <= {"summary.json"}


def test_a_limit_on_file_sizes_gets_a_sentence_too(console, spanlab, one_sentence, bytes_below, tmp_path):
    assert spanlab(*STUDY, *SMALL, f"output.root={tmp_path}").code == 0
    before = bytes_below(tmp_path / "quality" / "kept")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    done = console(*STUDY, f"output.root={tmp_path}", preexec_fn=limit)
    one_sentence(done, "output.root", "the disk is full")
    assert bytes_below(tmp_path / "quality" / "kept") == before
