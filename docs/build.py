"""Build the pages of this repository as one site, in strict mode.

    .venvs/dev/bin/python docs/build.py [FOLDER]

Copies the README, docs/ and benchmarks/ to FOLDER/source, so that the same links work on a code
host and in the site. Writes FOLDER/site. The default of FOLDER is outputs/docs. The exit code is
that of mkdocs: 1 if a link is broken.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("README.md", "LICENSE", "docs", "benchmarks")
KINDS = {".md", ".png", ".csv", ".json", ".yaml"}


def main() -> int:
    """Build the site and return the exit code of mkdocs."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "docs"
    return build(folder.resolve())


def build(folder: Path) -> int:
    """Copy the pages to `folder`, build the site there, and return the exit code of mkdocs."""
    source, site = folder / "source", folder / "site"
    shutil.rmtree(source, ignore_errors=True)
    for path in pages():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    folders = {"SPANLAB_DOCS_SOURCE": str(source), "SPANLAB_DOCS_SITE": str(site)}
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(ROOT / "docs" / "mkdocs.yml"),
    ]
    return subprocess.run(command, env=os.environ | folders, check=False).returncode


def pages() -> Iterator[Path]:
    """Yield the files of the site: pages, and the figures and results that they link to."""
    for name in PARTS:
        path = ROOT / name
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in files if file.suffix in KINDS or file.name == "LICENSE")


if __name__ == "__main__":
    sys.exit(main())
