"""Publish finished runs: write them below benchmarks/NAME and fill the pages. No number is typed by hand.

    .venvs/sim/bin/python benchmarks/publish.py NAME [NAME ...]
    .venvs/sim/bin/python benchmarks/publish.py --check
    .venvs/sim/bin/python benchmarks/publish.py --rehash [NAME ...]
    .venvs/sim/bin/python benchmarks/publish.py --profiles outputs/designed_shapes/tiny{,-hybrid}

`--check` names the results that were published by other settings than their command has now. `--rehash` takes
the present settings for those of the results: after a change of the settings' form, and of no result.
`--profiles` copies profiles of `-cn calibrate` to calibrate/, where simulations find them; a profile replaces an
earlier one of the same model, machine and device.

`manifest.yaml` lists the run of NAME, its commands, and the published tables and figures. A folder then has

    overrides.yaml   what the command changes of its entry
    headline.json    origin, hash of the settings, numbers that texts of the pages quote
    TABLE.csv        each published table
    FIGURE.png       each published figure

Pages have marks, `<!-- MARK -->` to `<!-- /MARK -->`:

    NAME         origin (commands, data, device, commit), caveats, every table, every figure
    NAME:where   origin
    NAME:TABLE   one table with its commit
    TEXT         a text of texts.py

A run from a tree with uncommitted changes is refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from headline import config_hash, copy_figure, flat_rows, headline, write_headline, write_rows
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pages import HERE, ROOT, fill_mark, fill_page, table
from texts import TEXTS, texts_of

from spanlab.analyses.fit_profile import file_name
from spanlab.cli import compose
from spanlab.errors import sentence
from spanlab.report.table import Table, markdown, read
from spanlab.settings.composition import as_settings, open_schema
from spanlab.study.folder import CONFIG
from spanlab_sim.timings import Profile, read_profile

MARK = re.compile(r"<!-- ([^/ ][^ ]*) -->\n")


@dataclass(frozen=True)
class Result:
    """One entry of the manifest.

    name      folder below benchmarks/
    run       folder of the finished run
    commands  commands that make the run
    tables    published tables, each with the shown columns; none: all
    figures   published figures
    files     further files of the run to copy
    numbers   dotted keys of the summary that texts of the pages quote
    rows      lists of the summary that texts read, as CSV by name: a key, and a key inside its entries
    """

    name: str
    run: str
    commands: Sequence[str]
    tables: Mapping[str, Sequence[str]]
    figures: Sequence[str]
    files: Sequence[str] = ()
    numbers: Sequence[str] = ()
    rows: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Command(NamedTuple):
    """A command of the manifest: its entry, or the stem of its script, and what it changes."""

    entry: str
    overrides: tuple[str, ...]
    is_script: bool


def command_of(text: str) -> Command:
    """Return the parts of a command line."""
    words = shlex.split(text)
    overrides = tuple(word for word in words if "=" in word)
    if "-cn" in words:
        return Command(words[words.index("-cn") + 1], overrides, False)
    return Command(next(Path(word).stem for word in words if word.endswith(".py")), overrides, True)


def settings_of(name: str, command: Command) -> Any:
    """Return the settings of a published result as a run composes them.

    Raises:
        ValueError: the entry, or something that the command changes, is no longer known.
    """
    try:
        if not command.is_script:
            return compose(command.entry, list(command.overrides))
        if (scripts := str(HERE / "hybrid_answers")) not in sys.path:
            sys.path.append(scripts)
        from probe_report import settings_of as settings_of_script
        from probe_settings import HybridAnswers, TailReplay, TrainProbe

        programs = {"train_probe": TrainProbe, "hybrid_answers": HybridAnswers, "tail_replay": TailReplay}
        return settings_of_script(programs[command.entry], command.overrides)
    except (ValueError, LookupError, HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{name}: expected an entry and overrides that compose: {sentence(error)}") from error


def stored_command(result: Result, root: Path = ROOT) -> Command:
    """Return the entry of a published result with its stored overrides."""
    stored = yaml.safe_load((root / "benchmarks" / result.name / "overrides.yaml").read_text())
    return command_of(result.commands[0])._replace(overrides=tuple(stored))


def manifest(root: Path = ROOT) -> dict[str, Result]:
    """Return every published result by name."""
    entries = yaml.safe_load((root / "benchmarks" / "manifest.yaml").read_text())
    return {name: Result(name, **entry) for name, entry in entries.items()}


@dataclass(frozen=True)
class Published:
    """A copied result.

    tables  by name, with the shown columns
    ago     commits between the measurement and its publication
    """

    result: Result
    folder: Path
    summary: dict[str, Any]
    tables: dict[str, Table]
    ago: int

    def origin(self) -> str:
        """Return the origin: commands, data, model, device, commit."""
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
        """Return the caveats of the numbers; those of single points of a sweep are folded."""
        points = self.summary.get("points")
        failed = (point["failed"] for point in points or () if point["failed"])
        caveats = dict.fromkeys((*self.summary["caveats"], *failed))
        if points and caveats:
            items = "".join(f"<li>{caveat}</li>" for caveat in caveats)
            return f"<details><summary>Caveats of single points</summary><ul>{items}</ul></details>\n"
        return "".join(f"- **{caveat}**\n" for caveat in caveats)

    def commit(self) -> str:
        """Return the commit, and its age at publication."""
        commits = "commit" if self.ago == 1 else "commits"
        return f"Commit {self.summary['commit']}, measured {self.ago} {commits} before publication"

    def table(self, name: str) -> str:
        """Return one table with its commit and the meaning of its columns."""
        table = self.tables[name]
        notes = "".join(f"\n{note}.\n" for note in (self.commit(), *table.notes))
        return f"{markdown(table)}{notes}"

    def section(self, page: Path) -> str:
        """Return origin, caveats, tables and figures, with image paths relative to `page`."""
        titles = {name: table.title.partition("\n")[0] for name, table in self.tables.items()}
        tables = [f"**{title}**\n\n{self.table(name)}" for name, title in titles.items()]
        folder = os.path.relpath(self.folder, page.parent)
        images = [f"![{name}]({folder}/{name}.png)" for name in self.result.figures]
        return "\n".join([self.origin(), self.caveats(), *tables, *([*images, ""] if images else [])])

    def content_of_mark(self, suffix: str, page: Path) -> str:
        """Return the content of a mark of this result; `suffix` follows the colon."""
        if not suffix:
            return self.section(page)
        return self.origin() if suffix == "where" else self.table(suffix)


def publish(result: Result, root: Path) -> Published:
    """Write a finished run below benchmarks/ in its published form.

    Raises:
        ValueError: the run is not from a committed tree.
    """
    run, folder = root / result.run, root / "benchmarks" / result.name
    summary = json.loads((run / "summary.json").read_text())
    ago = commits_ago(summary["commit"], root)
    stored = read(run)
    tables = {name: select_columns(stored[name], columns) for name, columns in result.tables.items()}
    found = headline(summary, result.numbers, run_settings(run, result), date_of(summary["commit"], root))
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)  # earlier versions wrote figures there
    for path in folder.iterdir():
        if path.suffix in (".json", ".yaml", ".csv", ".png"):
            path.unlink()
    write_headline(folder, found)
    write_overrides(folder, command_of(result.commands[0]))
    for name in (*(f"tables/{name}.csv" for name in tables), *result.files):
        shutil.copy(run / name, folder / Path(name).name)
    for name, keys in result.rows.items():
        write_rows(folder / f"{name}.csv", flat_rows(summary, keys))
    for name in result.figures:
        copy_figure(run / "figures" / f"{name}.png", folder / f"{name}.png")
    return Published(result, folder, summary, tables, ago)


def run_settings(run: Path, result: Result) -> Any:
    """Return the settings of a finished run: those of its config file."""
    schema = type(settings_of(result.name, command_of(result.commands[0])))
    stored: Any = OmegaConf.merge(OmegaConf.structured(open_schema(schema)), OmegaConf.load(run / CONFIG))
    return as_settings(stored)


def write_overrides(folder: Path, command: Command) -> None:
    """Write what a command changes of its entry, as Hydra does."""
    (folder / "overrides.yaml").write_text(yaml.safe_dump(list(command.overrides), allow_unicode=True, width=1000))


def date_of(commit: str, root: Path) -> str:
    """Return the day of a commit."""
    command = ["git", "-C", str(root), "show", "-s", "--format=%cs", commit]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def present_hashes(names: Sequence[str], root: Path) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """Yield the headline of each published result, where it is, and the hash of its present settings."""
    for name, result in manifest(root).items():
        path = root / "benchmarks" / name / "headline.json"
        if path.exists() and (not names or name in names):
            yield path, json.loads(path.read_text()), config_hash(settings_of(name, stored_command(result, root)))


def check(root: Path = ROOT) -> list[str]:
    """Return a sentence for each result that was published by other settings."""
    return [
        f"{path.parent.relative_to(root / 'benchmarks')}: published by other settings than its command has now"
        for path, found, now in present_hashes((), root)
        if found["config"] != now
    ]


def rehash(names: Sequence[str], root: Path = ROOT) -> list[str]:
    """Store the hash of the present settings; without names, for all results whose settings are known."""
    changed = []
    for path, found, now in present_hashes(names, root):
        if found["config"] not in (None, now):
            write_headline(path.parent, found | {"config": now})
            changed.append(f"{path.parent.relative_to(root / 'benchmarks')}: {found['config']} is now {now}")
    return changed


PROFILES = HERE / "calibrate"
PROFILE_FIGURES = ("predicted", "residuals")
PROFILE_HEAD = ("profile", "measured on", "when", "shapes, steps", "error of steps left out: median", "p95", "mean")


def publish_profiles(runs: Sequence[Path]) -> None:
    """Copy the profiles of finished runs with their figures, and fill the page of all profiles."""
    for run in runs:
        path = PROFILES / file_name(read_profile(run / "profile.json"))
        shutil.copy(run / "profile.json", path)
        path.with_suffix("").mkdir(exist_ok=True)
        for name in PROFILE_FIGURES:
            copy_figure(run / "figures" / f"{name}.png", path.with_suffix("") / f"{name}.png")
    paths = sorted(PROFILES.glob("*.json"))
    rows = [profile_row(path, read_profile(path)) for path in paths]
    images = "".join(
        f"![Steps of {path.stem}, predicted against measured]({path.stem}/predicted.png)\n" for path in paths
    )
    fill_page(PROFILES / "README.md", "profiles", f"{table(PROFILE_HEAD, rows)}\n{images}")


def profile_row(path: Path, profile: Profile) -> tuple[str, ...]:
    """Return a profile's row of the page."""
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    threads = f", {profile.threads} thread{'s' * (profile.threads > 1)}" if profile.device == "cpu" else ""
    machine = f"{profile.machine}, {profile.device}{threads}, {profile.dtype}, {versions}"
    errors = [
        f"{100 * profile.left_out[name]:{sign}.1f} %" for name, sign in (("median", ""), ("p95", ""), ("bias", "+"))
    ]
    when = f"{profile.date}, commit {profile.commit}"
    return f"[`{profile.model}`]({path.name})", machine, when, f"{profile.shapes}, {profile.steps}", *errors


def select_columns(table: Table, columns: Sequence[str]) -> Table:
    """Return the table with its first column and the named ones, or with all columns if none is named."""
    names = [column.name for column in table.columns]
    return table.with_columns([0, *map(names.index, columns)]) if columns else table.shown()


def commits_ago(commit: str, root: Path) -> int:
    """Return the number of commits since `commit`.

    Raises:
        ValueError: the commit is unknown or dirty.
    """
    if commit == "unknown" or commit.endswith("-dirty"):
        raise ValueError(f"commit={commit}: expected a run of a committed tree")
    command = ["git", "-C", str(root), "rev-list", "--count", f"{commit}..HEAD"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise ValueError(f"commit={commit}: expected a commit of this repository")
    return int(completed.stdout)


def pages(root: Path) -> Iterator[Path]:
    """Yield every page that may have marks."""
    yield root / "README.md"
    yield from sorted((root / "docs").glob("*.md"))
    yield from sorted((root / "benchmarks").rglob("*.md"))


def fill_pages(published: Mapping[str, Published], texts: Mapping[str, str], root: Path) -> None:
    """Fill every mark of the published results and texts."""
    for page in pages(root):
        text = page.read_text()
        for mark in MARK.findall(text):
            name, _, suffix = mark.partition(":")
            if mark in texts:
                text = fill_mark(text, mark, texts[mark])
            elif name in published:
                text = fill_mark(text, mark, published[name].content_of_mark(suffix, page))
        page.write_text(text)


def main(names: Sequence[str], root: Path = ROOT) -> None:
    """Publish the named results, and the texts that read one of them."""
    results = manifest(root)
    measured = {source.rpartition("/")[0] for text in TEXTS.values() for source in text.sources} - results.keys()
    unknown = [name for name in names if name not in {*results, *measured}]
    if unknown or not names:
        raise ValueError(f"NAME={' '.join(unknown)}: expected some of {', '.join([*results, *sorted(measured)])}")
    published = {name: publish(results[name], root) for name in names if name in results}
    fill_pages(published, texts_of(set(names), root), root)


if __name__ == "__main__":
    try:
        match sys.argv[1:]:
            case ["--check"]:
                print("\n".join(check()))
            case ["--rehash", *given]:
                print("\n".join(rehash(given)))
            case ["--profiles", *given]:
                publish_profiles([Path(run) for run in given])
            case given:
                main(given)
    except (ValueError, OSError) as error:
        sys.exit(f"publish: {error}")
