"""The folder of one run: a new run is written to a partial folder, and replaces the old run when it
is complete."""

from __future__ import annotations

import codecs
import errno
import fcntl
import hashlib
import io
import itertools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import orjson
import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from spanlab.core.request import Request
from spanlab.errors import warn
from spanlab.registry import fingerprints
from spanlab.report.table import Table, print_tables, write
from spanlab.settings.analyses import short_key
from spanlab.settings.arms import leaves
from spanlab.study.numbers import replace_file
from spanlab.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Output that cannot fail a study: ASCII for characters that a terminal lacks, a warning if
# stdout is closed.
# ------------------------------------------------------------------------------

# one character each, so that columns stay columns
_ASCII = dict(zip("×÷−–±·…†→", "x/--~|.*>", strict=True))
# where stdout is no terminal and COLUMNS does not say: enough for every column of a table
_WIDE = 240


def use_ascii_fallback() -> None:
    """Let stdout and stderr write an ASCII character for one that they cannot encode."""
    codecs.register_error("spanlab", _ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="spanlab")


def _ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "the error handler is for encoding only"
    characters = error.object[error.start : error.end]
    return "".join(_ASCII.get(character, "?") for character in characters), error.end


class _Page(io.StringIO):
    """Buffer of text for stdout."""

    encoding = "utf-8"


@contextmanager
def printed() -> Iterator[Console]:
    """Yield a console whose text is written to stdout at the end; a failure is a warning on
    stderr."""
    stdout, page, columns = Console(), _Page(), os.environ.get("COLUMNS", "")
    page.encoding = stdout.encoding
    wide = int(columns) if columns.isdecimal() and int(columns) else _WIDE
    yield Console(
        file=page,
        force_terminal=stdout.is_terminal,
        width=stdout.width if stdout.is_terminal else wide,
    )
    if sys.stdout is None:  # closed before the program began
        return
    try:
        sys.stdout.write(page.getvalue())
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        warn(f"stdout cannot be written, the results are in the run's folder: {error}")
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------------------------------------------------------
# Progress bars of a study on the terminal: all requests with the remaining time, and each
# running arm.
# ------------------------------------------------------------------------------


@contextmanager
def arm_progress(totals: dict[str, int], console: Console) -> Iterator[Callable[[list[int]], None]]:
    """Show a bar for the whole study and one for each running arm; disabled where the console is no
    terminal.

    Yields a function that updates every bar from the finished requests by arm, in the order of
    `totals`.

    `totals`  number of requests by arm
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    disabled = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=disabled
    ) as bars:
        all_arms = bars.add_task("all arms", total=sum(totals.values()))
        arms = [bars.add_task(name, total=total, visible=False) for name, total in totals.items()]

        def show(counts: list[int]) -> None:
            bars.update(all_arms, completed=sum(counts))
            for arm, total, count in zip(arms, totals.values(), counts, strict=True):
                bars.update(arm, completed=count, visible=0 < count < total)

        yield show


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping, colours or markup; write errors are ignored."""
    with suppress(OSError):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


# ------------------------------------------------------------------------------
# The config file of a run: a resumed run must have the same settings and data, or more cells.
# ------------------------------------------------------------------------------

# Settings that decide where and how a run executes, not its results: they may change when a run is
# resumed.
_INCIDENTAL = ("output", "tracking", "executor")

#: Settings of a study that select the reported results, or add cells; they change no cell.
_REPORTED = ("analyses", "families", "goodput", "slo", "plan")
GROWING = ("seeds", "only", "load", "baseline", "count_hit_as", "sweep", *_REPORTED)
_FINGERPRINTS: WeakKeyDictionary[Workload, str] = WeakKeyDictionary()
_DATA = "# requests: "
_PLUGIN = "# plugin: "


def as_yaml(config: dict[str, Any], workload: Workload) -> str:
    """Settings of a run as YAML, with fingerprints of its plugins and requests, which can change
    under one name."""
    plugins = fingerprints(config.get("plugins", ())).items()
    notes = [f"{_PLUGIN}{name} {contents}\n" for name, contents in plugins]
    return f"{settings_yaml(config)}{''.join(notes)}{_DATA}{fingerprint(workload)}\n"


def settings_yaml(config: dict[str, Any]) -> str:
    """Settings that decide the results of a run, as YAML."""
    # as `OmegaConf.to_yaml`, which first makes nodes of all values: that takes most of its time
    text: str = yaml.dump(
        _decisive(config),
        Dumper=get_omega_conf_dumper(),
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
    )
    return text


def settings_key(config: dict[str, Any]) -> str:
    """Key that is equal where `settings_yaml` is equal, and cheaper to compute."""
    return repr(_decisive(config))


def _decisive(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _INCIDENTAL}


def first_difference(old: str, new: str, growing: tuple[str, ...] = ()) -> str:
    """The first setting that differs, with both values; empty where no setting differs.

    `growing`  settings that may differ; arms may then be added or removed, but not changed
    """
    if old == new:
        return ""
    stored, current = read_settings(old), read_settings(new)
    if growing:
        shared = stored["arms"].keys() & current["arms"].keys()
        stored["arms"], current["arms"] = (
            {name: config["arms"][name] for name in shared} for config in (stored, current)
        )
    a, b = (
        {short_key(key): value for key, value in leaves(config)} for config in (stored, current)
    )
    unequal = (
        key
        for key in {**a, **b}
        if a.get(key) != b.get(key) and key.partition(".")[0] not in growing
    )
    return next(
        (f"{key}: {a.get(key, 'none')} there, {key}: {b.get(key, 'none')} now" for key in unequal),
        "",
    )


def read_settings(text: str) -> dict[str, Any]:
    """Parse the config file of a run; `data` is the fingerprint of its requests."""
    config: Any = OmegaConf.to_container(OmegaConf.create(text))
    plugins = [line.removeprefix(_PLUGIN) for line in text.splitlines() if line.startswith(_PLUGIN)]
    settings: dict[str, Any] = (
        {"arms": {}}
        | config
        | {"plugins": ", ".join(plugins), "data": text.partition(_DATA)[2].strip()}
    )
    return settings


def fingerprint(workload: Workload) -> str:
    """Hash of the requests' contents, or of the log that they come from; computed once for each
    workload."""
    if workload not in _FINGERPRINTS:
        source = workload.origin if workload.log is None else workload.log.fingerprint
        _FINGERPRINTS[workload] = source or _requests_fingerprint(workload.requests)
    return _FINGERPRINTS[workload]


def _requests_fingerprint(requests: tuple[Request, ...]) -> str:
    """Hash of the requests' contents; a shared span is hashed once."""
    digest, numbers = hashlib.sha256(), dict[int, int]()
    for request in requests:
        for span in request.spans:
            if id(span) not in numbers:
                numbers[id(span)] = len(numbers)
                digest.update(span.tokens.data)
        spans = [
            (numbers[id(span)], len(span.ids), span.independent, span.reusable)
            for span in request.spans
        ]
        digest.update(
            repr(
                (request.id, request.group_id, request.output_len, request.arrived_at, spans)
            ).encode()
        )
    return digest.hexdigest()


CONFIG, SUMMARY = "config.yaml", "summary.json"
#: Said of a run that an error ended after its results: `spanlab.load(RUN).report` and the closing
#: sentence.
REPORT, UNFINISHED = "report", "unfinished"  # key of `summary.json` and its value in such a run
UNFINISHED_REPORT = (
    "has all results, but its figures or its report are unfinished: output.if_exists=resume goes on"
)
# in a partial folder that was copied from a finished run: the identity of that run
_COPIED = ".copied"
_LONGEST_NAME = 120


def folder_name(text: str) -> str:
    """Folder name of a run: at most 120 characters, none of them special in a shell.

    A list becomes A+B, and overrides are joined by two underscores. A name that lost characters
    ends in a hash.
    """
    lists = re.sub(
        r"\[([^\[\]]*)\]", lambda match: match[1].replace(", ", "+").replace(",", "+"), text
    )
    name = lists.replace("/", ":").replace(",", "__")
    safe = re.sub(r"[^\w.=+:@%~-]", "", name)
    if safe == name and len(name) <= _LONGEST_NAME:
        return name
    return f"{safe[: _LONGEST_NAME - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class RunFolder:
    """Run folder: `path` is the folder of the finished run; all files are written to `work` until
    `finish`.

    `if_exists`  replace: start a new run, and rename the old one by its time stamp; resume:
                 continue a run with the same settings; fail: raise if the run exists
    `config`     the resolved settings as YAML; a resumed run must have the same, except for those
                 in `growing`

    A finished run is deleted only if the new run continued a copy of it; any other is renamed by
    its time stamp. Each step is one rename, so that the next process completes what a killed one
    began.
    """

    def __init__(
        self,
        root: Path,
        workload: str,
        run: str,
        if_exists: str,
        config: str,
        growing: tuple[str, ...] = (),
    ) -> None:
        folder = root / workload
        self.path, self.work = folder / run, folder / f".{run}.partial"
        self._old, self._scratch = folder / f".{run}.old", folder / f".{run}.scratch"
        self._complete = False
        self._lock = _lock(folder / f".{run}.lock", run)
        for path in (self.path, self.work, self._old, self._scratch):
            if path.is_symlink():
                raise _link_error(path, self.path.name)
        self._recover()
        check_names(root, workload, run, if_exists, config, growing)
        if if_exists == "resume":
            # continue from the partial folder, or from a copy of the finished one
            if self.path.exists() and not self.work.exists():
                shutil.copytree(self.path, self._scratch)
                (self._scratch / _COPIED).write_text(_identity(self.path))
                os.rename(self._scratch, self.work)
        else:
            self._discard(self.work)
        self.work.mkdir(parents=True, exist_ok=True)
        replace_file(self.work / CONFIG, config.encode())

    def _recover(self) -> None:
        """Complete the renames of a process that was killed in `finish`."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._old.exists():
            if not self.path.exists():
                os.rename(self.work if self.work.exists() else self._old, self.path)
            self._settle_old()

    def _discard(self, folder: Path) -> None:
        """Delete a folder; a process that is killed meanwhile leaves no part of it under its
        name."""
        if folder.exists():
            os.rename(folder, self._scratch)
            shutil.rmtree(self._scratch, ignore_errors=True)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._complete:
                self.finish()
                if error is not None:
                    error.add_note(f"{self.path} {UNFINISHED_REPORT}")
            elif error is not None:
                self._recover()  # after an error between the renames of `finish`
        finally:
            self._lock.close()

    def complete(self) -> None:
        """Mark all results as written: from here on, leaving the block publishes the run even after
        an error."""
        self._complete = True

    def finish(self) -> None:
        """Replace the old run by the new one."""
        self._complete = False
        for path in sorted(self.work.rglob(".*")):  # temporary files of a killed process
            if path.is_file() and path.name != _COPIED:
                path.unlink()
        if self.path.exists():
            os.rename(self.path, self._old)
        os.rename(self.work, self.path)
        self._settle_old()

    def _settle_old(self) -> None:
        """Delete the replaced run if the new one continued a copy of it, else rename it by its time
        stamp."""
        mark = self.path / _COPIED
        if self._old.exists() and mark.exists() and mark.read_text() == _identity(self._old):
            self._discard(self._old)
        elif self._old.exists():
            # the replaced run is named by its time stamp
            source = next(path for path in (self._old / SUMMARY, self._old) if path.exists())
            stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(source.stat().st_mtime))
            names = (
                f"{self.path.name}.{stamp}{f'_{n}' if n > 1 else ''}" for n in itertools.count(1)
            )
            target = next(path for path in map(self.path.with_name, names) if not path.exists())
            os.rename(self._old, target)
            print_line(Console(stderr=True), f"the previous run was moved to {target}")
        mark.unlink(missing_ok=True)


def check_names(
    root: Path, workload: str, run: str, if_exists: str, config: str, growing: tuple[str, ...] = ()
) -> None:
    """Raise what `RunFolder` raises for runs of this name that exist, or for a root that is no
    folder; writes nothing.

    Arguments are those of `RunFolder`.
    """
    folder = root / workload
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    path, work = folder / run, folder / f".{run}.partial"
    if if_exists == "fail" and path.exists():
        raise ValueError(
            f"output.run={run}: {path} exists; expected a new name, or output.if_exists=replace"
        )
    if if_exists == "fail" and work.exists():
        raise ValueError(
            f"output.run={run}: {work} is unfinished; expected output.if_exists=resume or replace"
        )
    source = work if work.exists() else path
    if if_exists != "resume" or not (source / CONFIG).exists():
        return
    difference = first_difference((source / CONFIG).read_text(), config, growing)
    if difference:
        raise ValueError(
            f"output.if_exists=resume: {source} has other settings ({difference}); "
            "expected the same, or output.if_exists=replace"
        )


def _identity(folder: Path) -> str:
    """A text that a folder keeps when it is renamed."""
    status = folder.stat()
    return f"{status.st_dev} {status.st_ino}"


def _link_error(path: Path, run: str) -> ValueError:
    return ValueError(
        f"output.run={run}: {path} is a symbolic link; expected no link, or another name"
    )


def _lock(path: Path, run: str) -> IO[str]:
    """Lock a run's name until the file is closed, so that two processes cannot write one folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:  # a link of another user would lead to any file
        lock = os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "w"
        )
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _link_error(path, run) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"output.run={run}: another process is writing it; expected one at a time, or another name"
        ) from None
    return lock


# ------------------------------------------------------------------------------
# Results of a finished run: summary and tables in its folder, figures, and tables on the
# terminal.
# ------------------------------------------------------------------------------


def entry_folder(settings: Any, name: str, run: str, root: Path) -> RunFolder:
    """Return the run folder of an entry that is no study; it is in the folder `name` of all its
    runs."""
    return RunFolder(*entry_names(settings, name, run, root))


def entry_names(settings: Any, name: str, run: str, root: Path) -> tuple[Path, str, str, str, str]:
    """Return the arguments of `RunFolder`, and of the check of its names, for an entry that is no
    study."""
    return root, name, run, settings.output.if_exists, settings_yaml(asdict(settings))


def read_summary(folder: Path, *keys: str) -> dict[str, Any]:
    """Read `summary.json`; ValueError with its path where it is no JSON object or lacks one of the
    keys, as A.B."""
    path = folder / SUMMARY
    try:
        summary: Any = orjson.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: expected the summary of a finished run: {error}") from error
    if not isinstance(summary, dict):
        raise ValueError(
            f"{path}: expected the summary of a finished run, an object with {', '.join(keys)}"
        )
    check_keys(path, summary, keys)
    return summary


def check_keys(path: Path, contents: Any, keys: Iterable[str]) -> None:
    """Raise ValueError where one of the keys, as A.B, is missing in nested objects that were read
    from a file."""
    for key in keys:
        value = contents
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                raise ValueError(
                    f"{path}: no {key}; expected the folder of a run that this version finished"
                )
            value = value[name]


def write_results(summary: dict[str, Any], tables: Sequence[Table], folder: Path) -> None:
    """Write `summary.json` and all tables into a folder."""
    _write_summary(summary, folder)
    write(tables, folder)


def write_before_report(
    summary: dict[str, Any], tables: Sequence[Table], folder: RunFolder
) -> None:
    """Write summary and tables of a run whose figures and report follow; from here on, an error
    publishes it.

    Until `finish_report`, the summary has the key `report` with the value `unfinished`.
    """
    write_results(summary | {REPORT: UNFINISHED}, tables, folder.work)
    folder.complete()


def finish_report(summary: dict[str, Any], folder: RunFolder) -> None:
    """Publish a run whose figures and report are written, with its final summary."""
    _write_summary(summary, folder.work)
    folder.finish()


def _write_summary(summary: dict[str, Any], folder: Path) -> None:
    text = orjson.dumps(summary, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    replace_file(folder / SUMMARY, text)


def draw_figures(draws: Mapping[str, Callable[[], Figure | None]], folder: Path) -> list[Path]:
    """Draw every figure in this process, and return the PNG files; `draws` has functions by file
    name."""
    from spanlab.report.style import write_figure  # loads matplotlib, half a second

    files = [path for name, draw in draws.items() for path in write_figure(draw, folder / name)]
    return [path for path in files if path.suffix == ".png"]


def publish(folder: RunFolder, tables: Sequence[Table]) -> None:
    """Replace the old run of an entry by the new one, and print tables and the path."""
    folder.finish()
    with printed() as console:
        print_tables(tables, console)
    print_line(Console(stderr=True), str(folder.path))


def slug(text: str) -> str:
    """Convert a text to a name that is valid in any file system."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
