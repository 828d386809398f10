"""The entry `conformance_cases`: decisions of any simulator beside those that a real server made,
case by case."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from spanlab.compiled import HOME
from spanlab.provenance import run_facts
from spanlab.registry import REQUIRED, entry, one_of, positive
from spanlab.report.table import Field, Table, count, tabulate, word
from spanlab.settings.server import OutputSettings
from spanlab.study.folder import entry_folder, print_line, publish, write_results
from spanlab.typed_json import from_json, shown
from spanlab.workloads.files import open_unpacked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# ------------------------------------------------------------------------------
# Settings: the driver, and the cases that it gets.
# ------------------------------------------------------------------------------

#: What a driver may claim about a case, and whether two claims are compared request by request.
PROPERTIES = ("reused", "preemptions", "steps")
CASES = HOME / "benchmarks" / "conformance" / "cases"
_ENDING = ".jsonl.zst"
_LONGEST = 2**28  # bytes of an answer


@dataclass
class ConformanceCases:
    """Count the cases in which a simulator decides as a real server did; docs/cases.md has the
    contract.

    `driver`   command that reads a case per line, and writes its decisions per line
    `release`  server whose decisions are expected, such as vllm_0_32
    `cases`    file of cases; null: those of this project for `release`
    `kinds`    kinds of cases to ask; []: all
    `names`    cases to ask; []: all
    `limit_s`  seconds for the answer to a case
    `fail_on`  claims that end the run with exit code 1 where one is not equal: reused, preemptions,
               steps
    `output`   where the run is written
    """

    driver: str = REQUIRED
    release: str = "vllm_0_32"
    cases: str | None = None
    kinds: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    limit_s: float = 60.0
    fail_on: list[str] = field(default_factory=list)
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        positive("limit_s", self.limit_s)
        for name in self.fail_on:
            one_of("fail_on", name, PROPERTIES)
        try:
            words = shlex.split(self.driver)
        except ValueError as error:
            raise ValueError(f"driver={self.driver}: expected a command ({error})") from error
        if not words:
            raise ValueError(f"driver={self.driver}: expected a command")
        self.output.refuse_resuming()

    @property
    def path(self) -> Path:
        """The file of the cases."""
        return CASES / f"{self.release}{_ENDING}" if self.cases is None else Path(self.cases)


# ------------------------------------------------------------------------------
# Cases and answers: one JSON object per line.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decisions:
    """What a scheduler decided about the requests of a case; None: it claims nothing.

    `reused`       prompt tokens that each request reused at its first admission; None for one that
                   was never admitted
    `preemptions`  number of all preemptions
    `steps`        computed tokens of each step by request; a step without a request is empty
    """

    reused: list[int | None] | None = None
    preemptions: int | None = None
    steps: list[dict[str, int]] | None = None


@dataclass(frozen=True)
class Answer(Decisions):
    """A line of a driver: decisions, or why the simulator does not model the case."""

    name: str = ""
    unsupported: str | None = None


@dataclass(frozen=True)
class StoredCase:
    """A line of a file of cases.

    `name`      unique in the file
    `release`   the server that decided
    `kind`      the row of the table
    `settings`, `requests`  as in docs/cases.md; drivers get them, and `expected` is kept from them
    """

    name: str
    release: str
    kind: str
    settings: dict[str, Any]
    requests: list[dict[str, Any]]
    expected: Decisions

    @property
    def question(self) -> bytes:
        """The line that a driver gets."""
        return (
            orjson.dumps({key: value for key, value in vars(self).items() if key != "expected"})
            + b"\n"
        )

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests: the size of a case."""
        return sum(len(request["tokens"]) for request in self.requests)


def read_stored(path: Path) -> Iterator[StoredCase]:
    """Yield the cases of a file; ValueError with its path and the line of the first mistake."""
    try:
        with open_unpacked(path) as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield from_json(line, StoredCase)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise ValueError(
            f"cases={path}: expected a readable file of cases ({error.strerror or error})"
        ) from error


def chosen(settings: ConformanceCases) -> list[StoredCase]:
    """Return the cases that the driver gets; ValueError where a kind or a name is unknown."""
    if settings.cases is None and not settings.path.is_file():
        known = ", ".join(
            sorted(path.name.removesuffix(_ENDING) for path in CASES.glob(f"*{_ENDING}"))
        )
        raise ValueError(f"release={settings.release}: expected one of {known}, or cases=FILE")
    every = list(read_stored(settings.path))
    for kind in settings.kinds:
        one_of("kinds", kind, sorted({case.kind for case in every}))
    names = {case.name for case in every}
    if unknown := [name for name in settings.names if name not in names]:
        raise ValueError(f"names=[{unknown[0]}]: no such case in {settings.path}")
    return [
        case
        for case in every
        if (not settings.kinds or case.kind in settings.kinds)
        and (not settings.names or case.name in settings.names)
    ]


# ------------------------------------------------------------------------------
# The driver: a process that answers line by line.
# ------------------------------------------------------------------------------


class DriverError(ValueError):
    """The driver ended, was silent, or wrote something else than an answer; what it answered before
    is reported."""


@asynccontextmanager
async def _started(command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a driver, and end it at the end."""
    pipe = asyncio.subprocess.PIPE
    try:
        driver = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdin=pipe, stdout=pipe, limit=_LONGEST
        )
    except OSError as error:
        raise ValueError(
            f"driver={command}: expected a command that starts ({error.strerror or error})"
        ) from error
    try:
        yield driver
    finally:
        if driver.returncode is None:
            with suppress(ProcessLookupError):
                driver.kill()
            await driver.wait()


async def _ask(driver: asyncio.subprocess.Process, case: StoredCase, limit_s: float) -> Answer:
    """Return the answer to one case."""
    assert driver.stdin is not None and driver.stdout is not None, "both are pipes"
    line = b""
    with suppress(ConnectionError):  # a driver that ended has no line either
        driver.stdin.write(case.question)
        try:
            async with asyncio.timeout(limit_s):
                await driver.stdin.drain()
                line = await driver.stdout.readline()
        except TimeoutError as error:
            raise DriverError(f"{case.name}: no answer for limit_s={limit_s:g} seconds") from error
    if not line:
        raise DriverError(
            f"{case.name}: the driver ended with exit code {await driver.wait()}; expected an answer"
        )
    try:
        answer = from_json(line, Answer, unknown="ignore")
    except ValueError as error:
        raise DriverError(
            f"{case.name}: the driver wrote {shown(line.decode(errors='replace'))}: {error}"
        ) from error
    if answer.name != case.name:
        raise DriverError(
            f"{case.name}: the driver answered name={shown(answer.name)}; expected one line per case"
        )
    if answer.reused is not None and len(answer.reused) != len(case.requests):
        lengths = f"reused of {len(answer.reused)} requests"
        raise DriverError(
            f"{case.name}: the driver answered {lengths}; expected {len(case.requests)}"
        )
    return answer


# ------------------------------------------------------------------------------
# Counts by kind, and the smallest case that differs.
# ------------------------------------------------------------------------------


@dataclass
class KindCounts:
    """Cases of one kind: how many were answered, and of each claim how many were made and equal.

    `unsupported`  cases that the driver does not model, by its reason
    `requests`     requests whose reuse was claimed, and those that are equal
    `smallest`     by claim, the smallest case that differs
    """

    cases: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    claimed: Counter[str] = field(default_factory=Counter)
    equal: Counter[str] = field(default_factory=Counter)
    requests: list[int] = field(default_factory=lambda: [0, 0])
    smallest: dict[str, tuple[int, str, str]] = field(default_factory=dict)

    def add(self, case: StoredCase, answer: Answer) -> None:
        """Count an answer."""
        self.cases += 1
        if answer.unsupported is not None:
            self.unsupported[answer.unsupported] += 1
            return
        for name in PROPERTIES:
            expected, given = getattr(case.expected, name), getattr(answer, name)
            if given is None or expected is None:
                continue
            self.claimed[name] += 1
            if given == expected:
                self.equal[name] += 1
            else:
                difference = (case.tokens, case.name, _difference(name, given, expected))
                self.smallest[name] = min(difference, self.smallest.get(name, difference))
        if answer.reused is not None and case.expected.reused is not None:
            self.requests[0] += len(case.requests)
            pairs = zip(answer.reused, case.expected.reused, strict=False)
            self.requests[1] += sum(ours == theirs for ours, theirs in pairs)

    def numbers(self) -> dict[str, Any]:
        """Return the counts for the summary; every claim has a number."""
        claimed, equal = self.requests
        return {
            "cases": self.cases,
            "unsupported": dict(self.unsupported),
            "claimed": {name: self.claimed[name] for name in PROPERTIES},
            "equal": {name: self.equal[name] for name in PROPERTIES},
            "requests": {"claimed": claimed, "equal": equal},
            "smallest": {
                name: {"case": case, "prompt_tokens": tokens, "difference": difference}
                for name, (tokens, case, difference) in self.smallest.items()
            },
        }


def _difference(name: str, given: Any, expected: Any) -> str:
    """Return the first difference of two claims in words."""
    if not isinstance(expected, list):
        return f"{given}, expected {expected}"
    what = "request" if name == "reused" else "step"
    pairs = zip(given, expected, strict=False)
    first = next(
        (at for at, (left, right) in enumerate(pairs) if left != right),
        min(len(given), len(expected)),
    )
    left, right = (
        shown(lines[first]) if first < len(lines) else "none" for lines in (given, expected)
    )
    return f"{what} {first}: {left}, expected {right}"


def _equal_of_claimed(name: str, row: tuple[str, KindCounts]) -> str:
    counts = row[1]
    return f"{counts.equal[name]:,} of {counts.claimed[name]:,}" if counts.claimed[name] else ""


_COLUMNS = (
    Field("kind", "kind", word, lambda row: row[0], left=True),
    Field("cases", "cases", count, lambda row: row[1].cases),
    Field(
        "unsupported",
        "not\nmodelled",
        count,
        lambda row: row[1].unsupported.total() or None,
        empty=(None,),
    ),
    Field("reused", "reuse\nequal", word, partial(_equal_of_claimed, "reused"), empty=("",)),
    Field(
        "requests",
        "of\nrequests",
        word,
        lambda row: (
            f"{row[1].requests[1]:,} of {row[1].requests[0]:,}" if row[1].requests[0] else ""
        ),
        empty=("",),
    ),
    Field(
        "preemptions",
        "preemptions\nequal",
        word,
        partial(_equal_of_claimed, "preemptions"),
        empty=("",),
    ),
    Field("steps", "all steps\nequal", word, partial(_equal_of_claimed, "steps"), empty=("",)),
)


def total_of(kinds: dict[str, KindCounts]) -> KindCounts:
    """Return the counts of all kinds together."""
    total = KindCounts()
    for counts in kinds.values():
        total.cases += counts.cases
        for name in ("unsupported", "claimed", "equal"):
            getattr(total, name).update(getattr(counts, name))
        total.requests = [sum(pair) for pair in zip(total.requests, counts.requests, strict=True)]
        for name, difference in counts.smallest.items():
            total.smallest[name] = min(difference, total.smallest.get(name, difference))
    return total


def table_of(kinds: dict[str, KindCounts], title: str) -> Table:
    """Return the table with a row for each kind and one for all; reasons and smallest differences
    are its notes."""
    total = total_of(kinds)
    notes = [
        f"{reason}: not modelled in {number:,} cases"
        for reason, number in total.unsupported.most_common()
    ]
    for name in PROPERTIES:
        if name in total.smallest:
            tokens, case, difference = total.smallest[name]
            notes.append(
                f"smallest difference of {name}: case {case} of {tokens:,} prompt tokens, {difference}"
            )
    rows = [*kinds.items(), ("all", total)]
    return tabulate("cases", title, _COLUMNS, rows, notes)


# ------------------------------------------------------------------------------
# The entry.
# ------------------------------------------------------------------------------


@entry("conformance_cases", ConformanceCases, check=lambda settings, root: chosen(settings))
def run_cases(settings: ConformanceCases, run: str, root: Path) -> bool:
    """Ask the driver for every case, and write the counts; return whether all claims of `fail_on`
    are equal.

    Raises ValueError where the driver ends or errs; the folder then has the cases before.
    """
    started, cases = time.perf_counter(), chosen(settings)
    kinds: dict[str, KindCounts] = {}
    problem: DriverError | None = None
    with entry_folder(settings, "conformance_cases", run, root) as folder:
        try:
            asyncio.run(_ask_all(settings, cases, kinds))
        except DriverError as error:
            problem = error
        table = table_of(
            kinds, f"decisions equal to those of {settings.release}\n{settings.driver}"
        )
        results = {
            name: counts.numbers() for name, counts in (*kinds.items(), ("all", total_of(kinds)))
        }
        summary = {
            "study": "conformance_cases",
            "driver": settings.driver,
            "release": settings.release,
            "cases": len(cases),
            "ended": None if problem is None else str(problem),
            "kinds": results,
        }
        summary |= run_facts(time.perf_counter() - started)
        write_results(summary, [table], folder.work)
        publish(folder, [table])
    if problem is not None:
        raise DriverError(
            f"{problem}; {folder.path} has the {results['all']['cases']} cases before"
        )
    unequal = [
        name
        for name in settings.fail_on
        if results["all"]["equal"][name] < results["all"]["claimed"][name]
    ]
    if unequal:
        print_line(
            Console(stderr=True), f"fail_on={settings.fail_on}: not equal: {', '.join(unequal)}"
        )
    return not unequal


async def _ask_all(
    settings: ConformanceCases, cases: Sequence[StoredCase], kinds: dict[str, KindCounts]
) -> None:
    async with _started(settings.driver) as driver:
        for case in cases:
            answer = await _ask(driver, case, settings.limit_s)
            kinds.setdefault(case.kind, KindCounts()).add(case, answer)
