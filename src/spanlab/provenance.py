"""Provenance of a result: version, commit, machine, versions of packages, wall time."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from spanlab.compiled import HOME, is_used

PACKAGES = (
    "spanlab",
    "numpy",
    "simpy",
    "hydra-core",
    "omegaconf",
    "scipy",
    "pyarrow",
    "matplotlib",
    "wandb",
)
PACKAGES_OF = {"sim": (), "engine": ("torch", "transformers"), "server": ("httpx",)}


def version() -> str:
    """Return the version of the package, and the checkout's commit."""
    return f"spanlab {importlib.metadata.version('spanlab')}, commit {commit()}"


def commit() -> str:
    """The checkout's commit, with `-dirty` where files differ from it; `unknown` outside a
    checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    process = subprocess.run(
        ["git", "-C", str(HOME), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return process.stdout.strip()


def run_facts(wall_s: float, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the end of a summary: facts that differ between two runs of the same settings.

    `packages`  further packages that this run used
    """
    return {
        "commit": commit(),
        "machine": machine(),
        "compiled": is_used(),
        "versions": {"python": platform.python_version()}
        | {
            name: installed
            for name in (*PACKAGES, *packages)
            if (installed := _version(name)) is not None
        },
        "wall_s": round(wall_s, 3),
    }


def _version(package: str) -> str | None:
    """The installed version; None for a package that this run could do without, such as a
    tracker."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> str:
    """Number and name of this machine's processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        name = platform.processor() or platform.machine()
    else:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.machine()
    return f"{os.cpu_count()} x {name}"
