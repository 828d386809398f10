"""Packages import only allowed packages, and the repository itself is never importable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent
HEAVY = {"torch", "triton", "transformers", "hydra", "omegaconf", "wandb", "datasets", "matplotlib"}
SOURCE_ROOTS = ("src", "sim", "kernels")


def test_import_contracts_are_kept():
    contracts = subprocess.run([SCRIPTS / "lint-imports", "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert contracts.returncode == 0, contracts.stdout + contracts.stderr


@pytest.mark.parametrize(
    ("module", "forbidden"), [("spanlab_sim.run", HEAVY), ("spanlab.core.scheduler", HEAVY | {"simpy"})]
)
def test_simulator_and_core_load_nothing_heavy(module, forbidden, tmp_path):
    probe = f"import {module}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert forbidden.isdisjoint(loaded.stdout.split())


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_roots_are_folders_not_packages(root):
    assert not (ROOT / root / "__init__.py").exists()


def test_the_console_script_keeps_the_repository_off_the_path(tmp_path):
    seen = tmp_path / "seen.json"
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, importlib.util, json, pathlib, sys\n"
        f"roots = {SOURCE_ROOTS!r}\n"
        "def tell():\n"
        "    found = [name for name in roots if importlib.util.find_spec(name)]\n"
        f"    pathlib.Path({str(seen)!r}).write_text(json.dumps([sys.path, found]))\n"
        "atexit.register(tell)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(tmp_path)
    subprocess.run([SCRIPTS / "spanlab", "--version"], cwd=ROOT, env=environment, capture_output=True, check=False)
    path, importable = json.loads(seen.read_text())
    assert ROOT not in [Path(entry).resolve() for entry in path]
    assert importable == []


def test_version_imports_no_program():
    start = "import sys; sys.argv = ['spanlab', '--version']; from spanlab.__main__ import main"
    code = f"{start}; main(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert HEAVY.isdisjoint(loaded)
    assert len([name for name in loaded if name.startswith("spanlab")]) < 10
