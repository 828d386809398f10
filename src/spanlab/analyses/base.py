"""What every analysis shares: a finished study, findings, captions, caveats and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.build import build_recovery
from spanlab.core.request import Request
from spanlab.offline.bound import DESCENT, LIMIT
from spanlab.provenance import commit
from spanlab.report.data import ArmData, bytes_say_little
from spanlab.report.sweep import SweepPoint, by_axis
from spanlab.report.table import Page, Table, facts_of, print_tables, tracker_rows, write_page
from spanlab.settings.server import SERVER
from spanlab.settings.study import Study
from spanlab.stats import SATURATED, TOO_SHORT, UNSETTLED, describe_few
from spanlab.study.bounds import ArmFailure, ArmResult, describe_beaten
from spanlab.study.executor import Executor
from spanlab.study.folder import CONFIG, printed
from spanlab.study.machine import EngineFacts, Noise
from spanlab.study.numbers import ArmFiles
from spanlab.tracking import tracked
from spanlab.workloads.shape import committed, committed_names
from spanlab.workloads.text import find_tokenizer
from spanlab.workloads.workload import Workload
from spanlab_sim.timings import Profile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Input and output of an analysis of a finished study.
# ------------------------------------------------------------------------------


class PointWorker(Protocol):
    """What a process of a study's executor has for the points that an analysis tries."""

    @property
    def study(self) -> Study:
        """The study, with its own settings."""
        ...

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests of its workload."""
        ...


@dataclass(frozen=True)
class Finished:
    """A study whose arms have run.

    name      the entry
    root      folder of all runs
    folder    folder of this run while it is written
    files     files of each arm that completed
    results   summaries of these files; present where an analysis needs ARMS
    failed    the error of each arm that failed, by arm
    plain     files of the requests in plain transformers, or why they failed; None where no
              analysis reads them
    facts     device of the engine; None for a simulation
    noise     noise of the engine's machine; None for a simulation
    profile   timing model that predicts the engine; None where no analysis reads it
    shares    loads as shares of saturation, by rate; empty where the study sets rates
    workers   the study's executor; None where no analysis needs POINTS
    """

    study: Study
    name: str
    root: Path
    folder: Path
    workload: Workload
    files: Mapping[str, ArmFiles]
    results: list[ArmResult]
    failed: dict[str, str]
    plain: ArmFiles | ArmFailure | None
    facts: EngineFacts | None
    noise: Noise | None
    profile: Profile | None
    shares: Mapping[float, float] = field(default_factory=dict)
    workers: Executor[Any] | None = None

    @property
    def measured(self) -> list[MeasuredArm]:
        """The arms that completed, for comparisons of families."""
        return [
            MeasuredArm(result.data.name, result.data.summary, result.ttft_sums)
            for result in self.results
        ]

    def noise_sentence(self, refused: str) -> str:
        """Sentence why the study reports no `refused`, such as speedups; empty on a calm machine
        and in simulations."""
        return self.noise.sentence(refused) if self.noise else ""


@dataclass(frozen=True)
class Findings:
    """Results of one analysis.

    summary  entries of `summary.json`; no other analysis has the same keys
    tables   printed in this order
    further  tables that are written and not printed
    figures  picklable functions that draw the figures, by file name; they return None where there
             is no figure
    caveats  sentences that a reader of the numbers must know
    """

    summary: dict[str, Any]
    tables: tuple[Table, ...] = ()
    further: tuple[Table, ...] = ()
    figures: Mapping[str, Callable[[], Figure | None]] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()

    @property
    def every_table(self) -> tuple[Table, ...]:
        """All tables, the printed ones first."""
        return (*self.tables, *self.further)


# ------------------------------------------------------------------------------
# Check whether a study counts tokens with a tokenizer of another model.
# ------------------------------------------------------------------------------

#: Vocabulary sizes of the tokenizers that committed shapes were measured with.
_OF_SHAPES = {"qwen2": 151_646}
#: Models with a smaller vocabulary are synthetic and have no tokenizer.
_LEAST_VOCABULARY = 16_384
#: Rows of an embedding table are rounded up for the device; real models leave fewer of them unused.
_MOST_UNUSED = 0.02


def foreign_tokenizer(study: Study) -> tuple[str, ...]:
    """One caveat where the tokenizer's vocabulary cannot be the model's; empty where no text was
    tokenized."""
    workload, rows = study.workload, study.model.vocab_size
    if workload.tokenizer is not None:
        file = find_tokenizer(workload.tokenizer)
        name, tokens = file.name, file.tokenizer.get_vocab_size()
    elif (
        workload.source == "shape"
        and workload.path is None
        and workload.kind in committed_names()
        and (known := committed(workload.kind, None).meta.get("tokenizer")) is not None
    ):
        name, tokens = known["name"], _OF_SHAPES[known["name"]]
    else:
        return ()
    if rows < _LEAST_VOCABULARY or (1 - _MOST_UNUSED) * rows <= tokens <= rows:
        return ()
    return (
        f"tokens are those of the {name} tokenizer, {tokens:,} of them, "
        f"and not {study.model.name}'s own, whose vocabulary has {rows:,}: lengths differ",
    )


# ------------------------------------------------------------------------------
# Caveats of a study's numbers: one sentence each, under the table.
# ------------------------------------------------------------------------------

UNKNOWN_QUALITY = (
    "reuse of a span at another position than the one at which it was computed changes answers, and a repair undoes a "
    "part of the change: the simulator does not show how good the answers are"
)


ROUNDED_STATES = (
    "{}: states are stored in a rounded format; the effect on answers is unknown in the simulator"
)
INEXACT_REPLAY = (
    "{}: not exact: recurrent layers read a residual stream without the outputs of attention; the effect on "
    "answers is not simulated"
)
GIVEN_ARRIVALS = (
    "arrivals are given and nothing is drawn: one seed is run, and intervals are over groups only"
)
FULL_STORE = (
    "no Pareto figures: the store is full, so that resident bytes equal the budget, whatever the arm; sweep "
    'the budget instead: sweep=["store.total_gib=A,B,C"]'
)
LOOSE_BOUNDS = (
    f"offline bounds are looser than they could be: runs of more than {LIMIT:,} reuses and slots"
)


def caveats(study: Study, arms: Sequence[ArmData], failed: dict[str, str]) -> tuple[str, ...]:
    """Return every caveat of a study, most general first."""
    failed_baseline = f"no speedups, for {study.runs.baseline} failed"
    descends = any(DESCENT in (arm.summary["bounds"]["offline_methods"] or ()) for arm in arms)
    sizes = dict.fromkeys((len(arm.summary["seeds"]), arm.summary["groups"]) for arm in arms)
    saturated, unsettled = with_verdict(arms, SATURATED), with_verdict(arms, UNSETTLED)
    no_end = "MSER-5 finds no end of the warm-up in the first half of the run"
    grows = "the queue grows as long as requests arrive, so that mean delays depend on the length of the run"
    if study.runs.baseline in saturated:
        grows += f"; no speedups, for {study.runs.baseline} is one of them"
    steps: Counter[str] = Counter()
    for run in (run for arm in arms for run in arm.runs):
        steps.update(run["beyond"])
    # the most frequent features first; a run of equal decode steps counts once
    beyond = ", ".join(f"{name} in {count:,} steps" for name, count in steps.most_common())
    return (
        *foreign_tokenizer(study),
        *_inexact(study),
        *_drafted(study),
        *([failed_baseline] if study.runs.baseline in failed else []),
        *([] if study.draws_arrivals() else [GIVEN_ARRIVALS]),
        *filter(None, (describe_few(*size) for size in sizes)),
        *(
            [f"saturated at {load_words(study)}: {', '.join(saturated)}: {grows}"]
            if saturated
            else []
        ),
        *([f"not settled: {', '.join(unsettled)}: {no_end}"] if unsettled else []),
        *_warmup(study, arms),
        *([FULL_STORE] if bytes_say_little(arms) else []),
        *([f"timing beyond what its profile was measured on: {beyond}"] if beyond else []),
        *describe_beaten(study, arms),
        *([LOOSE_BOUNDS] if descends else []),  # too large a run for the tightest bound
    )


def _drafted(study: Study) -> Iterator[str]:
    speculation = study.batch.speculation
    if not speculation.draft_tokens:
        if speculation.draft_layers:
            yield "batch.speculation.draft_tokens=0: nothing is drafted, and no layer of a drafter is loaded"
        return
    accepted = (
        f"each of {speculation.draft_tokens} drafts per step is accepted with probability "
        f"{speculation.acceptance:g}"
    )
    layers = f", and layers of the drafter ({speculation.draft_layers}) are as large as the model's"
    size = layers if speculation.has_kv else ""
    yield f"speculative decoding: {accepted} if those before it are{size}: assumed, not measured"


def _inexact(study: Study) -> Iterator[str]:
    """Yield caveats about answers that the arms change and the simulator does not compute."""
    if study.backend == "sim" and any(
        study.arms[name].spans is not None for name in study.chosen()
    ):
        yield UNKNOWN_QUALITY
    replays = {
        name: build_recovery(study.model, study.arms[name]).replay for name in study.chosen()
    }
    replayed = [name for name, replay in replays.items() if replay is not None and not replay.exact]
    rounded = [name for name in study.chosen() if study.arms[name].state_format != "native"]
    for sentence, names in ((INEXACT_REPLAY, replayed), (ROUNDED_STATES, rounded)):
        if names:
            yield sentence.format(", ".join(names))


def with_verdict(arms: Sequence[ArmData], verdict: str) -> list[str]:
    """Return the names of the arms with this verdict."""
    return [arm.name for arm in arms if arm.summary["stationarity"]["verdict"] == verdict]


def _warmup(study: Study, arms: Sequence[ArmData]) -> Iterator[str]:
    if len(with_verdict(arms, TOO_SHORT)) == len(arms):
        yield "too few requests to detect a warm-up: fewer than 100 per seed"
        return
    warmups = [arm.summary["stationarity"]["warmup_requests"] or 0 for arm in arms]
    if any(warmups) and not study.runs.warmup_fraction:
        yield (
            f"delays include the warm-up from an empty cache, {min(warmups)} to {max(warmups)} requests by MSER-5; "
            "warmup_fraction=0.5 leaves it out"
        )


def load_words(study: Study) -> str:
    """Return a label of the study's load: clients, requests per second, or the given arrivals."""
    rate, clients = study.arrivals.rate_rps, study.arrivals.clients
    if clients is not None:
        return f"{clients} client" + ("s" if clients > 1 else "")
    per = " per group" if study.arrivals.kind == "poisson_per_group" else ""
    return "the given arrivals" if rate is None else f"{rate:g}/s{per}"


# ------------------------------------------------------------------------------
# Metadata of a study: the head of its summary, and the provenance line under its figures.
# ------------------------------------------------------------------------------


def head(finished: Finished) -> dict[str, Any]:
    """Return settings and data source of a study, for `summary.json`."""
    study, workload, provenance = finished.study, finished.workload, finished.workload.provenance
    return {
        "study": finished.name,
        "workload": {
            "name": workload.name,
            "kind": study.workload.kind,
            "source": study.workload.source,
            "provenance": provenance.kind,
            "detail": provenance.detail,
            "requests": workload.size,
            "documents_cut": provenance.documents_cut,
            "documents_dropped": provenance.documents_dropped,
        },
        "model": study.model.name,
        "hardware": study.hardware.name,
        "timing": study.timing.kind if study.server.base_url is None else None,
        "backend": study.backend,
        "engine": asdict(finished.facts) if finished.facts else None,
        "store": describe_store(study),
        "seeds": study.runs.seeds,
        "repeats": study.runs.repeats,
        "warmup_fraction": study.runs.warmup_fraction,
        "hit_means": f"at least one {study.runs.count_hit_as} token",
        "baseline": study.runs.baseline,
        "offered_load": load_words(study),
        "failed": finished.failed,
    }


def footer(finished: Finished) -> str:
    """Return the provenance of a study in one line."""
    study = finished.study
    seeds = f"{len(study.runs.seeds)} seed" + ("s" if len(study.runs.seeds) > 1 else "")
    repeats = f" · {study.runs.repeats} repeats" if study.runs.repeats > 1 else ""
    timed = _timing(study) if finished.facts is None else finished.facts.line()
    failed = f" · failed: {', '.join(finished.failed)}" if finished.failed else ""
    # unknown for a real server
    store = f"store {describe_store(study)} · " if study.backend != SERVER else ""
    arrivals = finished.study.arrivals
    if finished.shares:
        load = f"{arrivals.kind} at {', '.join(f'{share:g}' for share in finished.shares.values())} of saturation"
    else:
        load = f"{arrivals.kind} {arrivals.rate_rps:g}/s" if arrivals.rate_rps else arrivals.kind
    return (
        f"{finished.workload.provenance.line()} · {study.model.name} · {timed} · {load} · "
        f"{store}{seeds}{repeats} · commit {commit()}{failed}"
    )


def describe_store(study: Study) -> str:
    """Return a description of the store's budget."""
    store = study.store
    total_label = "for KV and states together" if study.model.is_hybrid else "for KV"
    kv_gib, state_gib = store.pools_gib
    budgets = ((store.total_gib, total_label), (kv_gib, "of KV"), (state_gib, "of states"))
    labels = [
        (f"{gib:g} GiB" if gib >= 1 else f"{1024 * gib:g} MiB") + f" {label}"
        for gib, label in budgets
        if gib is not None
    ]
    if store.entries is not None:
        labels.append(f"{store.entries} entries")
    labels += [
        f"{name} {rules.gib:g} GiB at {rules.bandwidth_gb_s:g} GB/s"
        for name, rules in store.tiers.items()
    ]
    per_replica = f" in each of {study.replicas.count} replicas" if study.replicas.count > 1 else ""
    return (", ".join(labels) or "unlimited") + per_replica


def _timing(study: Study) -> str:
    if study.backend == SERVER:
        return f"measured at {study.server.base_url or f'a server that the study started, {study.server.engine}'}"
    if "twin" in study.chosen_analyses():
        return f"step times fitted to the log, on {study.hardware.name}"
    if study.timing.kind == "fitted":
        return f"simulated, step times fitted to a server's log, on {study.hardware.name}"
    if study.timing.kind == "calibrated":
        return f"simulated, step times calibrated for {study.model.name} on this machine"
    if study.timing.kind == "roofline":
        return f"simulated, roofline on {study.hardware.name}, uncalibrated"
    return f"simulated, {study.timing.kind} timing"


# ------------------------------------------------------------------------------
# Parts of the findings over all points of a sweep that several analyses share.
# ------------------------------------------------------------------------------


def point_entries(points: Sequence[SweepPoint], key: str) -> list[dict[str, Any]]:
    """Return the settings of each point with the entry `key` of its summary."""
    return [{"settings": dict(point.settings), **point.findings(key)} for point in points]


def findings_by_axis(
    name: str,
    points: Sequence[SweepPoint],
    table: Callable[[str, list[SweepPoint]], Table],
    figure: Callable[..., Figure | None],
    summary: dict[str, Any],
) -> Findings:
    """Return one table and one figure per axis of the sweep, `name`_1 and so on; `figure` draws a
    group of points."""
    groups = {f"{name}_{number}": group for number, group in enumerate(by_axis(points).values(), 1)}
    return Findings(
        summary=summary,
        tables=tuple(table(axis, group) for axis, group in groups.items()),
        figures={axis: partial(figure, group) for axis, group in groups.items()},
    )


# ------------------------------------------------------------------------------
# A finished study for the terminal, the tracker, and as one page.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Report of a finished study.

    footer   provenance of its numbers, in one line
    figures  image paths relative to the run folder
    """

    study: Study
    name: str
    footer: str
    summary: dict[str, Any]
    findings: list[Findings]
    figures: list[Path]

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of the analyses."""
        return [table for findings in self.findings for table in findings.every_table]

    @property
    def failed(self) -> dict[str, str]:
        """Error of each failed arm, by arm."""
        failed: dict[str, str] = self.summary["failed"]
        return failed

    def write_page(self, folder: Path) -> None:
        """Write `report.html` into the run folder, which already has the other files."""
        page = Page(
            title=self.name,
            tables=tuple(self.tables),
            about=(self.footer,),
            caveats=tuple(self.summary["caveats"]),
            failed=tuple(self.failed.values()),
            figures=sorted(folder / path for path in self.figures),
            config=(folder / CONFIG).read_text(),
            facts=facts_of(self.summary),
        )
        write_page(page, folder)

    def show(self) -> None:
        """Print the tables of every analysis."""
        with printed() as console:
            for number, findings in enumerate(self.findings):
                if number:
                    console.print()
                print_tables(findings.tables, console)

    def track(self, run: str, folder: Path) -> None:
        """Send figures, summary and tables to the tracker; `folder` is the published run folder."""
        with tracked(self.study.tracking, run, self.name, asdict(self.study), folder) as tracker:
            tracker.figures([folder / path for path in self.figures])
            tracker.summary(self.summary)
            for table in self.tables:
                tracker.table(table.name, *tracker_rows(table))


@dataclass(frozen=True)
class MeasuredArm:
    """One arm of a study.

    `summary`    its entry in `summary.json`
    `ttft_sums`  seconds of TTFT by seed and group, shape (seeds, groups)
    """

    name: str
    summary: Mapping[str, Any]
    ttft_sums: NDArray[np.float64]

    @property
    def saturated(self) -> bool:
        """Whether its queue grows, so that its mean TTFT depends on the length of the run."""
        return bool(self.summary["stationarity"]["verdict"] == SATURATED)

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key of arms that serve the same requests: by mean TTFT, saturated arms last."""
        return self.saturated, float(self.ttft_sums.sum())
