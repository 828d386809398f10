"""Publish finished runs: copy them to benchmarks/NAME and fill the pages. No number is typed by hand.

    .venvs/sim/bin/python benchmarks/publish.py NAME [NAME ...]

`manifest.yaml` says where the run of NAME is, which commands made it, and which of its tables and figures are
published. Pages have marks, `<!-- MARK -->` to `<!-- /MARK -->`:

    NAME         where it was measured, caveats, every table, every figure
    NAME:where   where it was measured
    NAME:TABLE   one table, and where it was measured
    TEXT         a text of texts.py

A run from a tree with changes that are not committed is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from texts import TEXTS, texts_of

from spanlab.report import faces
from spanlab.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
MARK = re.compile(r"<!-- ([^/ ][^ ]*) -->\n")


@dataclass(frozen=True)
class Result:
    """One entry of the manifest.

    name      folder below benchmarks/
    run       folder of the finished run
    commands  what makes the run
    tables    published tables, each with the columns that are shown; none: all
    figures   published figures
    files     further files of the run that are copied
    """

    name: str
    run: str
    commands: Sequence[str]
    tables: Mapping[str, Sequence[str]]
    figures: Sequence[str]
    files: Sequence[str] = ()


def manifest(root: Path = ROOT) -> dict[str, Result]:
    """Every published result by name."""
    found = yaml.safe_load((root / "benchmarks" / "manifest.yaml").read_text())
    return {name: Result(name, **entry) for name, entry in found.items()}


@dataclass(frozen=True)
class Published:
    """A result that has been copied.

    tables  by name, with the columns that are shown
    ago     commits between the measurement and its publication
    """

    result: Result
    folder: Path
    summary: dict[str, Any]
    tables: dict[str, Table]
    ago: int

    def where(self) -> str:
        """Commands, data, model, device, commit."""
        summary = self.summary
        commands = ", ".join(f"`{command}`" for command in self.result.commands)
        work, engine = summary["workload"], summary.get("engine")
        if engine:
            device = f"on {engine['device']}"
        else:
            device = f"on {summary['hardware']}, {summary['timing']} timing, simulated"
        seeds = len(summary["seeds"])
        first = f"first of {len(summary['points'])} points: " if "points" in summary else ""
        return (
            f"{commands}: {first}{work['provenance']}: {work['detail']}; {summary['model']} {device}; {seeds} "
            f"seed{'s' * (seeds > 1)}. {self.commit()} on {summary['machine']}, {summary['wall_s']:.0f} s.\n"
        )

    def caveats(self) -> str:
        """What a reader of the numbers must know; that of single points of a sweep can be unfolded."""
        points = self.summary.get("points")
        failed = (point["failed"] for point in points or () if point["failed"])
        found = dict.fromkeys((*self.summary["caveats"], *failed))
        if points and found:
            items = "".join(f"<li>{words}</li>" for words in found)
            return f"<details><summary>Caveats of single points</summary><ul>{items}</ul></details>\n"
        return "".join(f"- **{words}**\n" for words in found)

    def commit(self) -> str:
        """The commit, and how old it was when it was published."""
        commits = "commit" if self.ago == 1 else "commits"
        return f"Commit {self.summary['commit']}, measured {self.ago} {commits} before publication"

    def table(self, name: str) -> str:
        """One table with its commit and what its columns mean."""
        table = self.tables[name]
        notes = "".join(f"\n{note}.\n" for note in (self.commit(), *table.notes))
        return f"{faces.markdown(table)}{notes}"

    def section(self, page: Path) -> str:
        """All of it, with images as the page reaches them."""
        titles = {name: table.title.partition("\n")[0] for name, table in self.tables.items()}
        tables = [f"**{title}**\n\n{self.table(name)}" for name, title in titles.items()]
        folder = os.path.relpath(self.folder, page.parent)
        images = [f"![{name}]({folder}/{name}.png)" for name in self.result.figures]
        return "\n".join([self.where(), self.caveats(), *tables, *([*images, ""] if images else [])])

    def of_mark(self, part: str, page: Path) -> str:
        """What stands at a mark of this result; `part` follows the colon."""
        if not part:
            return self.section(page)
        return self.where() if part == "where" else self.table(part)


def publish(result: Result, root: Path) -> Published:
    """Copy a finished run below benchmarks/; ValueError where it must not be published."""
    run, folder = root / result.run, root / "benchmarks" / result.name
    summary = json.loads((run / "summary.json").read_text())
    ago = commits_ago(summary["commit"], root)
    stored = faces.read(run)
    tables = {name: chosen(stored[name], columns) for name, columns in result.tables.items()}
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)  # as earlier versions had it
    for path in folder.iterdir():
        if path.suffix in (".json", ".yaml", ".csv", ".png"):
            path.unlink()
    files = ["config.yaml", "summary.json", *(f"tables/{name}.csv" for name in tables), *result.files]
    for name in (*files, *(f"figures/{figure}.png" for figure in result.figures)):
        shutil.copy(run / name, folder / Path(name).name)
    return Published(result, folder, summary, tables, ago)


def chosen(table: Table, columns: Sequence[str]) -> Table:
    """The first column and those that are named; all columns where none is."""
    names = [column.name for column in table.columns]
    return table.with_columns([0, *map(names.index, columns)]) if columns else table.shown()


def commits_ago(commit: str, root: Path) -> int:
    """Commits since that one; ValueError where it cannot be told what was measured."""
    if commit == "unknown" or commit.endswith("-dirty"):
        raise ValueError(f"commit={commit}: expected a run of a committed tree")
    command = ["git", "-C", str(root), "rev-list", "--count", f"{commit}..HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"commit={commit}: expected a commit of this repository")
    return int(done.stdout)


def pages(root: Path) -> Iterator[Path]:
    """Every page that may have marks."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))
    yield from sorted((root / "benchmarks").rglob("*.md"))


def fill_pages(published: Mapping[str, Published], texts: Mapping[str, str], root: Path) -> None:
    """Fill every mark that belongs to one of these."""
    for page in pages(root):
        text = page.read_text()
        for mark in MARK.findall(text):
            name, _, part = mark.partition(":")
            if mark in texts:
                text = filled(text, mark, texts[mark])
            elif name in published:
                text = filled(text, mark, published[name].of_mark(part, page))
        page.write_text(text)


def filled(text: str, mark: str, content: str) -> str:
    """`text` with what stands between the two marks replaced."""
    pattern = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- /{re.escape(mark)} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"mark={mark}: expected <!-- {mark} --> and <!-- /{mark} --> on the page")
    return pattern.sub(lambda found: found[1] + content + found[2], text)


def main(names: Sequence[str], root: Path = ROOT) -> None:
    """Publish these results, and the texts that read one of them."""
    known = manifest(root)
    measured = {source.rpartition("/")[0] for text in TEXTS.values() for source in text.sources} - known.keys()
    unknown = [name for name in names if name not in {*known, *measured}]
    if unknown or not names:
        raise ValueError(f"NAME={' '.join(unknown)}: expected some of {', '.join([*known, *sorted(measured)])}")
    published = {name: publish(known[name], root) for name in names if name in known}
    fill_pages(published, texts_of(set(names), root), root)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as mistake:
        sys.exit(f"publish: {mistake}")
