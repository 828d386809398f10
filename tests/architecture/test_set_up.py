"""The two scripts install their environment: once, completely, from any folder. A fake uv replaces the network."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["runall.sh", "tests/run.sh", *(f"requirements/{name}.sh" for name in ("setup", "pin", "compile")), ".ci/run"]
TOOLS = ["bash", "cat", "chmod", "cksum", "dirname", "env", "ln", "mkdir", "rm", "rmdir", "sed", "sh", "sleep"]
NEEDS_UNHARMED = ["-cn", "smoke", "a b", "x=[1, 2]", 'it\'s="q"', "", "*", "$HOME", "tail\n"]

FAKE_UV = """#!/usr/bin/env bash
[[ $1 == --version ]] && echo "uv ${FAKE_VERSION:-0.13.8}" && exit
echo "$*" >>"$LOG"
[[ "$*" == *"${SLOW_AT:-nothing}"* ]] && sleep "$SLOW"
[[ "$*" == *"${FAIL_AT:-nothing}"* ]] && exit 2
bin="$PWD/.venvs/$NAME/bin"
case "$*" in
    *" venv "*) mkdir -p "$bin"; printf '#!%s\\n' "$(command -v bash)" >"$bin/python"; chmod +x "$bin/python" ;;
    *--editable*) for script in spanlab pytest; do cp_script "$bin/$script"; done ;;
esac
"""
COPY_SCRIPT = """#!/usr/bin/env bash
printf '#!%s\\nprintf "%%s\\\\0" "$PYTHONSAFEPATH" "$PWD" "$@"\\n' "$(command -v bash)" >"$1"
chmod +x "$1"
"""
FAKE_PYTHON_WITHOUT_PIP = """#!/usr/bin/env bash
[[ $1 == -I ]] && echo "$0"
"""
FAKE_PYTHON_WITH_PIP = """#!/usr/bin/env bash
[[ $1 == -I ]] && echo "$0" && exit
echo "$*" >>"$LOG"
while (($#)); do [[ $1 == --target ]] && mkdir -p "$2/bin" && ln -s "$SPARE_UV" "$2/bin/uv"; shift; done
exit 0
"""


class Checkout:
    """A copy of the scripts in a separate folder, on a machine that has TOOLS, Python and a fake uv."""

    def __init__(self, folder: Path, environment: str = "sim") -> None:
        self.root, self.bin, self.elsewhere, self.log = (
            folder / name for name in ("a checkout", "bin", "elsewhere", "uv.log")
        )
        for script in SCRIPTS:
            (self.root / script).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / script, self.root / script)
        for name in ("sim", "cluster", "answers", "dev", "build"):
            (self.root / f"requirements/{name}.txt").write_text(f"# {name}\n")
        (self.root / "requirements/uv.txt").write_text("uv==0.13.8 \\\n    --hash=none\n")
        (self.root / "pyproject.toml").write_text("")
        self.elsewhere.mkdir()
        self.bin.mkdir()
        for tool in TOOLS:
            self.link(tool, shutil.which(tool))
        self.link("python3", sys.executable)
        self.program("uv", FAKE_UV)
        self.program("cp_script", COPY_SCRIPT)
        self.environment = {"PATH": str(self.bin), "HOME": str(folder), "LOG": str(self.log), "NAME": environment}

    def link(self, name: str, target: str | None) -> None:
        if target is None:
            pytest.skip(f"this machine has no {name}")
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).symlink_to(target)

    def program(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.bin) / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def begin(self, *arguments: str, script: str = "runall.sh", cwd: Path | None = None, **variables: str):
        return subprocess.Popen(
            ["bash", str(self.root / script), *arguments],
            cwd=cwd or self.elsewhere,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, *arguments: str, **options) -> "Outcome":
        return Outcome(self.begin(*arguments, **options))

    def uv_calls(self) -> list[str]:
        calls = [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [words[1] if words[1] == "venv" else words[2] for words in calls]

    def venv(self, name: str = "sim") -> Path:
        return self.root / ".venvs" / name


class Outcome:
    """Output of a finished start, and the arguments that the program received."""

    def __init__(self, process: subprocess.Popen) -> None:
        out, self.said = process.communicate(timeout=30)
        self.code = process.returncode
        self.safe_path, self.cwd, *self.arguments = [*out.split("\0"), "", ""][: max(2, out.count("\0"))]


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_arguments_and_the_working_directory_pass_unharmed(checkout):
    outcome = checkout.start(*NEEDS_UNHARMED)
    assert outcome.code == 0, outcome.said
    assert outcome.arguments == NEEDS_UNHARMED
    assert Path(outcome.cwd) == checkout.elsewhere
    assert outcome.safe_path == "1"


def test_the_first_start_sets_up_and_the_second_only_starts(checkout):
    checkout.start()
    assert checkout.uv_calls() == ["venv", "sync", "install"]
    assert checkout.start("again").arguments == ["again"]
    assert checkout.uv_calls() == []


@pytest.mark.parametrize("file", ["requirements/sim.txt", "requirements/build.txt", "pyproject.toml"])
def test_changed_pins_are_synced_into_the_same_environment(checkout, file):
    checkout.start()
    checkout.uv_calls()
    (checkout.root / file).write_text("# changed\n")
    checkout.start()
    assert checkout.uv_calls() == ["sync", "install"]


@pytest.mark.parametrize("step", [" venv ", "sync", "--editable"])
def test_a_failed_set_up_is_reported_and_repaired_next_time(checkout, step):
    failed = checkout.start(FAIL_AT=step)
    assert failed.code != 0
    assert "the same command tries again" in failed.said
    checkout.uv_calls()
    (checkout.venv() / "bin").mkdir(parents=True, exist_ok=True)
    (rubbish := checkout.venv() / "bin/rubbish").touch()
    assert checkout.start("x").arguments == ["x"]
    assert checkout.uv_calls() == ["venv", "sync", "install"]
    assert not rubbish.exists()


def test_a_killed_set_up_is_repaired_by_the_next_start(checkout):
    checkout.link("flock", shutil.which("flock"))
    killed = checkout.begin(SLOW_AT="sync", SLOW="60")
    while "sync" not in (checkout.log.read_text() if checkout.log.exists() else ""):
        assert killed.poll() is None, "the set-up ended by itself"
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    checkout.uv_calls()
    assert checkout.start("x").arguments == ["x"]
    assert checkout.uv_calls() == ["venv", "sync", "install"]


@pytest.mark.parametrize("lock", ["flock", "mkdir"])
def test_two_first_starts_set_up_once(checkout, lock):
    if lock == "flock":
        checkout.link("flock", shutil.which("flock"))
    both = [checkout.begin(str(number), SLOW_AT="sync", SLOW="0.5") for number in range(2)]
    assert sorted(Outcome(process).arguments[0] for process in both) == ["0", "1"]
    assert checkout.uv_calls() == ["venv", "sync", "install"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("lock", ["flock", "mkdir"])
def test_a_shared_checkout_that_cannot_be_written_says_so(checkout, lock):
    if lock == "flock":
        checkout.link("flock", shutil.which("flock"))
    (checkout.root / ".venvs").mkdir()
    (checkout.root / ".venvs").chmod(0o555)
    outcome = checkout.start()
    assert outcome.code == 1
    assert outcome.said.startswith(f"spanlab: cannot write to {checkout.root}/.venvs")
    assert outcome.said.count("\n") == 1


def test_a_lock_of_another_user_says_so(checkout):
    checkout.link("flock", shutil.which("flock"))
    (checkout.root / ".venvs/lock").mkdir(parents=True)  # which cannot be opened for writing, even by root
    outcome = checkout.start()
    assert outcome.code == 1
    assert outcome.said.startswith(f"spanlab: cannot write to {checkout.root}/.venvs")
    assert outcome.said.count("\n") == 1


def test_a_moved_repository_gets_a_new_environment(checkout, tmp_path):
    checkout.start()
    checkout.uv_calls()
    checkout.root = checkout.root.rename(tmp_path / "moved")
    assert checkout.start("x").arguments == ["x"]
    assert checkout.uv_calls() == ["venv", "sync", "install"]


def test_an_environment_whose_python_is_gone_is_made_anew(checkout):
    checkout.start()
    checkout.uv_calls()
    (checkout.venv() / "bin/python").unlink()
    assert checkout.start("x").arguments == ["x"]
    assert checkout.uv_calls() == ["venv", "sync", "install"]


def test_the_program_asks_for_another_environment_by_a_variable(tmp_path):
    checkout = Checkout(tmp_path, environment="cluster")
    assert checkout.start("x", SPANLAB_ENVIRONMENT="cluster").arguments == ["x"]
    assert checkout.venv("cluster").exists()
    assert not checkout.venv("sim").exists()


@pytest.mark.parametrize("widest", ["cluster", "answers"])
def test_the_widest_environment_that_is_there_is_used(tmp_path, widest):
    checkout = Checkout(tmp_path, environment=widest)
    checkout.start(SPANLAB_ENVIRONMENT=widest)
    assert checkout.start("x").arguments == ["x"]
    assert not checkout.venv("sim").exists()


def test_a_missing_or_old_uv_is_installed_privately_with_hashes(checkout, tmp_path):
    spare = checkout.program("spare_uv", FAKE_UV, tmp_path)
    checkout.program("uv", '#!/bin/sh\necho "uv 0.1.2"\n')
    checkout.program("python3", FAKE_PYTHON_WITH_PIP)
    assert checkout.start("x", SPARE_UV=str(spare)).arguments == ["x"]
    pip = next(line for line in checkout.log.read_text().splitlines() if "pip install" in line)
    assert "--require-hashes" in pip
    assert f"--target {checkout.root}/.tools/uv" in pip


def test_without_python_there_is_one_sentence(checkout):
    (checkout.bin / "python3").unlink()
    outcome = checkout.start()
    assert outcome.code == 1
    assert outcome.said.startswith("spanlab: Python 3.11 or newer is needed")
    assert outcome.said.count("\n") == 1


def test_without_uv_and_pip_the_last_word_names_both(checkout):
    (checkout.bin / "uv").unlink()
    checkout.program("python3", FAKE_PYTHON_WITHOUT_PIP)
    outcome = checkout.start()
    assert outcome.code == 1
    assert outcome.said.splitlines()[-1].startswith("spanlab: neither uv nor pip was found")


def test_arguments_of_the_test_script_reach_pytest_with_paths_resolved(tmp_path):
    checkout = Checkout(tmp_path, environment="dev")
    (checkout.elsewhere / "mine.py").touch()
    (checkout.elsewhere / "radix").touch()
    given = ["mine.py::test_x", "tests/core", "-k", "radix", "-m", "slow or gpu"]
    outcome = checkout.start(*given, script="tests/run.sh")
    assert outcome.arguments == [f"{checkout.elsewhere}/mine.py::test_x", *given[1:]], outcome.said
    assert Path(outcome.cwd) == checkout.root
