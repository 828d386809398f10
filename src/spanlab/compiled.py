"""The core and the simulator compiled by mypyc, imported in place of the Python files.

A build belongs to one state of the sources and lies in `.compiled/KEY` of the checkout, which may
be deleted at any time. Records and runs are byte-identical with and without it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).resolve().parents[2]
CONF = HOME / "conf"  # entries and groups
BUILDS = HOME / ".compiled"
MODES = ("auto", "never", "always")
#: In the environment: `never` ignores a build; anything else uses the build of these sources where
#: there is one.
VARIABLE = "SPANLAB_COMPILED"

# Not compiled: requests and records, which are pickled and serialised; protocols, which users
# implement; and files that register named things or hold settings, whose signatures and fields are
# read.
_CORE = (
    "ahead ledger plan scheduler step store token_string tree eviction/scores "
    "policies/block_groups policies/block_pool policies/blocks policies/chunks policies/sequences policies/slots "
    "policies/tree policies/tree_variants"
)
_SIM = "run server timing"
_TYPES = ("compiled", "metrics", "model_spec", "records")
SOURCES = (
    "src/spanlab/metrics.py",
    *(f"src/spanlab/core/{name}.py" for name in _CORE.split()),
    *(f"sim/spanlab_sim/{name}.py" for name in _SIM.split()),
)
# What a build depends on: the sources, and the types that they read.
_READ = (
    "src/spanlab/core/**/*.py",
    "sim/spanlab_sim/*.py",
    *(f"src/spanlab/{name}.py" for name in _TYPES),
)
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
_BUILD = """
import gc, sys
from mypyc.build import mypycify
from setuptools import setup
gc.disable()  # the compiler keeps millions of objects: collections would take longer than compiling
modules = mypycify(["--config-file=", *sys.argv[2:]], opt_level="3", debug_level="0", target_dir="c")
setup(name="compiled", packages=[], ext_modules=modules, script_args=["-q", "build_ext", "--build-lib", sys.argv[1]])
gc.freeze()
"""


class _Finder:
    """Import finder for the compiled modules of a folder, before Python looks for their sources."""

    def __init__(self, folder: Path) -> None:
        files = (path.relative_to(folder) for path in folder.rglob(f"*{_SUFFIX}"))
        self._files = {".".join(file.parts).removesuffix(_SUFFIX): folder / file for file in files}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a compiled module; None if there is none."""
        return spec_from_file_location(name, self._files[name]) if name in self._files else None


@functools.cache
def build_folder() -> Path:
    """Return the folder of the build of these sources and this Python version."""
    digest = hashlib.sha256(_SUFFIX.encode())
    for path in sorted(path for pattern in _READ for path in HOME.glob(pattern)):
        digest.update(path.read_bytes())
    return BUILDS / digest.hexdigest()[:16]


def is_built() -> bool:
    """Return whether a build of these sources exists."""
    return BUILDS.is_dir() and build_folder().is_dir()


def is_used() -> bool:
    """Return whether this process imports compiled modules."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def use_build() -> None:
    """Import compiled modules from now on, if a build exists and the environment allows it."""
    if os.environ.get(VARIABLE) != "never" and not is_used() and is_built():
        sys.meta_path.insert(0, _Finder(build_folder()))


def build() -> None:
    """Compile the modules of `SOURCES`, which takes minutes; requires mypy, setuptools and a C
    compiler."""
    BUILDS.mkdir(exist_ok=True)
    target = build_folder()  # of the sources that are compiled: they may be edited meanwhile
    with tempfile.TemporaryDirectory(dir=BUILDS, prefix=".") as scratch:
        command = [
            sys.executable,
            "-c",
            _BUILD,
            "modules",
            *(str(HOME / source) for source in SOURCES),
        ]
        paths = {"MYPYPATH": f"{HOME / 'src'}:{HOME / 'sim'}", VARIABLE: "never"}
        process = subprocess.run(
            command, cwd=scratch, env=os.environ | paths, capture_output=True, text=True
        )
        if process.returncode:
            raise ValueError(
                f"compiled=always: the build failed\n{process.stdout[-4000:]}{process.stderr[-4000:]}"
            )
        if not target.is_dir():  # else another process has built it meanwhile
            os.rename(Path(scratch, "modules"), target)


def missing() -> str:
    """Return what a build needs and this machine lacks; empty where a build is possible."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        return f"a C compiler, there is no {compiler}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.exists() else f"Python's header files, there is no {header}"


def ensure_build() -> None:
    """Build these sources if no build exists; ValueError if this machine cannot."""
    if is_built():
        return
    if lacks := missing():
        raise ValueError(f"compiled=always: expected {lacks}; compiled=auto needs none")
    print(
        "spanlab: compiling the simulator, once for this state of the sources: some minutes",
        file=sys.stderr,
    )
    if find_spec("mypyc") and find_spec("setuptools"):
        build()
    elif subprocess.run(["bash", HOME / "requirements" / "compile.sh"]).returncode:
        raise ValueError("compiled=always: the build failed, see above; compiled=auto needs none")


def restart_as(mode: str) -> None:
    """Restart the program if `compiled=mode` requires other modules than it uses; auto accepts
    both.

    The program restarts at most once: afterwards the environment holds the mode.
    """
    if mode == "always":
        ensure_build()
    mismatch = is_used() if mode == "never" else mode == "always" and not is_used()
    if mismatch and os.environ.get(VARIABLE) != mode:
        os.environ[VARIABLE] = mode
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    build()
