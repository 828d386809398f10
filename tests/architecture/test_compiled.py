"""Compiled modules take the place of Python files, and change no result."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from spanlab import compiled
from spanlab.cli import compose
from spanlab.study import run

ROOT = Path(__file__).resolve().parents[2]
RECORDS = "records/*.jsonl", "runs/*.jsonl"


@pytest.fixture
def no_build(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "BUILDS", tmp_path)
    # this checkout may have a build, which the process then uses
    others = [finder for finder in sys.meta_path if not isinstance(finder, compiled._Finder)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setenv(compiled.VARIABLE, "auto")
    compiled.build_folder.cache_clear()  # an earlier test may have found the build of this checkout
    yield
    compiled.build_folder.cache_clear()


def fake_build() -> Path:
    folder = compiled.BUILDS / compiled.build_folder.__wrapped__().name
    (folder / "spanlab/core").mkdir(parents=True)
    file = folder / f"spanlab/core/tree{compiled._SUFFIX}"
    file.touch()
    compiled.build_folder.cache_clear()
    return file


def found(name: str) -> str | None:
    specs = (finder.find_spec(name, None) for finder in sys.meta_path[:1])
    return next((spec.origin for spec in specs if spec), None)


def test_no_build_leaves_python_modules(no_build):
    compiled.use_build()
    assert not compiled.is_used()


@pytest.mark.parametrize(
    ("heavy", "lacks", "override", "told"),
    [(48, "", "auto", True), (49, "", "auto", False), (48, "a C compiler", "auto", False), (48, "", "never", False)],
)
def test_a_heavy_study_says_that_it_could_be_compiled(no_build, monkeypatch, tmp_path, heavy, lacks, override, told):
    monkeypatch.setattr(run, "HEAVY", heavy)
    monkeypatch.setattr(run, "missing", lambda: lacks)
    arms = ["only=[none]", "seeds=[0]", "load.rates_rps=[]", "load.arms=[]"]
    study = compose(
        "smoke", [*arms, f"compiled={override}", "output.figures=false", "tracking.kind=none", "executor.kind=here"]
    )
    console = Console(file=io.StringIO(), width=240)
    run.run_study(study, "smoke", tmp_path, show=False, host=run.Host(console=console))
    line = (
        "48 requests are simulated uncompiled; compiled=always compiles the simulator once, and takes about two thirds"
    )
    assert (line in console.file.getvalue()) == told


def test_build_takes_the_place_of_sources(no_build):
    file = fake_build()
    compiled.use_build()
    assert compiled.is_used()
    assert found("spanlab.core.tree") == str(file)
    assert found("spanlab.core.request") is None


def test_never_ignores_a_build(no_build, monkeypatch):
    fake_build()
    monkeypatch.setenv(compiled.VARIABLE, "never")
    compiled.use_build()
    assert not compiled.is_used()


def test_other_sources_need_another_build(no_build, monkeypatch, tmp_path):
    before = compiled.build_folder.__wrapped__()
    for source in compiled.SOURCES:
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text("changed = True\n")
    monkeypatch.setattr(compiled, "HOME", tmp_path)
    assert compiled.build_folder.__wrapped__() != before


def test_always_without_compiler_says_so(no_build, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(ValueError, match=r"^compiled=always: expected a C compiler, there is no no-such-compiler"):
        compiled.ensure_build()


def test_every_compiled_source_exists():
    assert [source for source in compiled.SOURCES if not (ROOT / source).exists()] == []


@pytest.fixture(scope="module")
def real_build():
    compiled.ensure_build()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["smoke", "pic_sim"])
def test_compiled_records_are_equal_to_the_byte(real_build, tmp_path, entry):
    start = f"import sys; from spanlab.cli import main; sys.argv = ['spanlab', '-cn', '{entry}', *sys.argv[1:]]; main()"
    (tmp_path / "start_study.py").write_text(start)
    given = "seeds=[0]", "tracking.kind=none", "output.figures=false", "output.run=x"
    written = {}
    for mode in ("never", "always"):
        root = tmp_path / mode
        command = [sys.executable, str(tmp_path / "start_study.py"), *given, f"compiled={mode}", f"output.root={root}"]
        subprocess.run(command, check=True, capture_output=True)
        (folder,) = root.glob("*/x")
        assert f'"compiled": {str(mode == "always").lower()}' in (folder / "summary.json").read_text()
        files = sorted(path for pattern in RECORDS for path in folder.glob(pattern))
        written[mode] = {path.relative_to(folder): path.read_bytes() for path in files}
    assert written["never"]
    assert written["always"] == written["never"]


@pytest.mark.slow
def test_core_and_simulator_pass_compiled(real_build):
    command = [sys.executable, "-m", "pytest", "-q", "tests/core", "tests/sim"]
    done = subprocess.run(
        command, env=os.environ | {compiled.VARIABLE: "auto"}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
