"""A real server beside our scheduler, request by request: what was reused, when requests ran, and
the times.

Where the server writes its steps, our scheduler decides the same run again from the measured
arrivals, so that every decision can be compared. Where it does not, the simulator serves the same
requests, and only reuse is compared; with several clients, that depends on when each answer came.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished, footer
from spanlab.core.policies.block_pool import block_shape
from spanlab.records import Record, delays_of
from spanlab.registry import one_of
from spanlab.report.table import (
    Field,
    Table,
    count,
    hidden,
    percent,
    seconds,
    signed_percent,
    tabulate,
    word,
)
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.arms import Strategy
from spanlab.settings.server import SERVER, ServerSettings, held_token_bytes
from spanlab.settings.study import Study
from spanlab.study.backends import RealEngine, Simulator
from spanlab.study.jobs import Job, Jobs, run_cells
from spanlab.study.numbers import Columns, RunCell
from spanlab.study.servers.base import as_served
from spanlab.study.servers.steps import (
    FAULTS,
    LiveRun,
    Rendezvous,
    meet,
    other_release,
    read_run,
    write_case,
)

Floats = NDArray[np.float64]
COMPARED = ("reuse", "course", "steps", "engine")
_ENGINE = "analyses.rendezvous.engine=true"
_SHOWN_DIFFERENCES = 5
_SEVERAL = (
    "with several requests at once, what is stored when one arrives depends on the server's times"
)


@dataclass
class RendezvousSettings:
    """The comparison with a running server.

    `fail_on`  what must be equal in every request, else the run ends with exit code 1: reuse,
               course, steps, engine
    `accept`   faults of the server whose differences do not count for `fail_on`: block_size
    `preset`   the scheduler that decides the server's steps again
    `engine`   whether our engine serves the requests too, with the server's weights and blocks, and
               its reused tokens are compared
    """

    fail_on: list[str] = field(default_factory=list)
    accept: list[str] = field(default_factory=list)
    preset: str = "vllm_0_32"
    engine: bool = False


def _check(study: Study) -> None:
    from spanlab.schedule import PRESETS  # pydantic takes time to load

    options = study.analyses.rendezvous
    for name in options.fail_on:
        one_of("analyses.rendezvous.fail_on", name, COMPARED)
    if "engine" in options.fail_on and not options.engine:
        raise ValueError(
            f"analyses.rendezvous.fail_on={options.fail_on}: expected analyses.rendezvous.engine=true too"
        )
    for name in options.accept:
        one_of("analyses.rendezvous.accept", name, FAULTS)
    if study.backend != SERVER:
        raise ValueError(
            f"analyses=rendezvous with backend={study.backend}: expected backend={SERVER}"
        )
    one_of("analyses.rendezvous.preset", options.preset, PRESETS)
    if not options.engine:
        return
    # the engine keeps blocks in a tree: it does not have the cache of every server
    (name,) = study.chosen()
    pool = study.arms[name].pool
    if pool is None:
        policy = study.arms[name].policy_name
        raise ValueError(
            f"{_ENGINE} with arms.{name}, policy={policy}: expected an arm with a pool of blocks, as vLLM has"
        )
    if study.model.is_hybrid:
        raise ValueError(
            f"{_ENGINE} with model.name={study.model.name}: expected layers of attention alone, because the engine "
            "places states of recurrent layers by other rules than vLLM"
        )
    if pool.block_size is None:
        raise ValueError(
            f"{_ENGINE} with arms.{name}.pool.block_size=null: expected the size of the server's blocks"
        )


# ------------------------------------------------------------------------------
# One run of the server, by request.
# ------------------------------------------------------------------------------


class Delays(NamedTuple):
    """Seconds of each request, or of one."""

    ttft_s: Any
    tpot_s: Any
    e2e_s: Any


@dataclass(frozen=True)
class Compared:
    """One run: its requests in the order of their records.

    `served`, `decided`  tokens that the server and ours reused; the server's are NaN where it did
                         not say
    `course`             whether start, first token, end and preemptions are in the same steps; None
                         without steps
    `steps`, `differing`  number of steps, and of those whose tokens differ; None without steps
    `measured`, `stepped`  delays of the client, and of our scheduler where each step takes what it
                           took there
    `causes`             one sentence per difference
    `computed`           tokens that our engine reused; None where it did not serve
    `faults`             names of known faults of the server that explain differences
    """

    cell: RunCell
    prompt_tokens: int
    served: Floats
    decided: Floats
    course: NDArray[np.bool_] | None
    steps: int | None
    differing: int | None
    preemptions: tuple[int, int] | None
    measured: Delays
    stepped: Delays | None
    causes: tuple[str, ...]
    faults: tuple[str, ...] = ()
    computed: Floats | None = None

    @property
    def same_reuse(self) -> NDArray[np.bool_]:
        """Whether both reused the same number of tokens, by request."""
        return np.asarray(self.served == self.decided)

    @property
    def same_engine(self) -> NDArray[np.bool_] | None:
        """Whether the server and our engine reused the same number of tokens, by request."""
        return None if self.computed is None else np.asarray(self.served == self.computed)

    def broken(self) -> list[str]:
        """Return what is not equal everywhere."""
        equal = {
            "reuse": bool(self.same_reuse.all()),
            "course": self.course is None or bool(self.course.all()),
            "steps": not self.differing,
            "engine": self.same_engine is None or bool(self.same_engine.all()),
        }
        return [name for name in COMPARED if not equal[name]]

    def summary(self) -> dict[str, Any]:
        """The run for `summary.json`."""
        return {
            "seed": self.cell.seed,
            "rate_rps": self.cell.rate_rps,
            "requests": len(self.served),
            "same_reuse": int(self.same_reuse.sum()),
            "same_course": None if self.course is None else int(self.course.sum()),
            "steps": self.steps,
            "differing_steps": self.differing,
            "faults": list(self.faults),
            "preemptions": None if self.preemptions is None else self.preemptions[0],
            "our_preemptions": None if self.preemptions is None else self.preemptions[1],
            "hit_rate": None
            if np.isnan(self.served).any()
            else float(self.served.sum()) / self.prompt_tokens,
            "our_hit_rate": float(self.decided.sum()) / self.prompt_tokens,
            "same_engine": None if self.same_engine is None else int(self.same_engine.sum()),
            "engine_hit_rate": None
            if self.computed is None
            else float(self.computed.sum()) / self.prompt_tokens,
        }


def _by_steps(study: Study, cell: RunCell, columns: Columns, run: LiveRun) -> Compared:
    """Compare a run whose steps the server wrote."""
    preset = study.analyses.rendezvous.preset
    both = meet(run, preset)
    numbers = {served.number: at for at, served in enumerate(run.requests)}
    order = [numbers[int(request)] for request in columns["request_id"]]
    ours = [both.decided[at] for at in order]
    served = [run.requests[at] for at in order]
    # what differs: the first step, and requests whose log and answer do not agree
    causes = list(other_release(run, preset))
    if both.differences:
        first = both.differences[0]
        causes.append(
            f"step {first.step:,} is the first of {len(both.differences):,} that differ: the server computed "
            f"{_tokens(first.served)}, ours {_tokens(first.decided)}"
        )
    reported = columns["reused_tokens"].astype(float)
    logged = np.array([request.reused for request in served], float)
    if (others := int((reported != logged).sum())) and not np.isnan(reported).all():
        causes.append(
            f"{others:,} answers tell other reused tokens than the scheduler of the server has decided"
        )
    return Compared(
        cell,
        int(columns["prompt_tokens"].sum()),
        logged,
        np.array([decided.reused for decided in ours], float),
        np.array([both.same_course(at) for at in order]),
        both.num_steps,
        len(both.differences),
        (
            sum(request.preemptions for request in served),
            sum(decided.preemptions for decided in ours),
        ),
        _client_delays(columns),
        _stepped(both, order),
        tuple(causes),
        tuple(name for name, fault in FAULTS.items() if both.differences and fault.applies(run)),
    )


def _client_delays(columns: Columns) -> Delays:
    delays = delays_of(columns)
    return Delays(delays["ttft_s"], delays["tpot_s"], delays["e2e_s"])


def _stepped(both: Rendezvous, order: Sequence[int]) -> Delays:
    """Return the delays of our decisions if every step ends when that of the server did."""
    ends = np.array([step.ended for step in both.run.steps]) * 1e-9
    last = len(ends) - 1
    first = np.array([ends[min(both.decided[at].first, last)] for at in order])
    end = np.array([ends[min(both.decided[at].last, last)] for at in order])
    added = np.array([both.run.requests[at].added_at for at in order]) * 1e-9
    tokens = np.array([both.run.requests[at].output_len for at in order])
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(tokens > 1, (end - first) / (tokens - 1), np.nan)
    return Delays(first - added, tpot, end - added)


def _tokens(step: Mapping[str, int] | None) -> str:
    if not step:
        return "nothing"
    shown = [
        f"{tokens:,} of request {request}"
        for request, tokens in list(step.items())[:_SHOWN_DIFFERENCES]
    ]
    return ", ".join(shown) + (
        f" and {len(step) - len(shown)} more" if len(step) > len(shown) else ""
    )


def _by_simulation(study: Study, cell: RunCell, columns: Columns, job: Job) -> Compared:
    """Compare the reuse of a run of which only the answers are known."""
    decided: dict[int, int] = {}

    def finished(record: Record) -> None:
        decided[record.request_id] = record.reused_tokens

    simulated = replace(
        study, backend="sim", server=ServerSettings(), analyses=ANALYSES.section()()
    )
    Simulator(simulated).simulate(replace(job, requests=as_served(study, job.requests)), finished)
    served = columns["reused_tokens"].astype(float)
    ours = np.array([decided[int(request)] for request in columns["request_id"]], float)
    causes = []
    if np.isnan(served).all():
        causes.append(
            "the server reports no reused tokens: expected usage.prompt_tokens_details.cached_tokens"
        )
    elif job.clients != 1 and not np.array_equal(served, ours):
        causes.append(_SEVERAL)
    prompt = int(columns["prompt_tokens"].sum())
    delays = _client_delays(columns)
    return Compared(cell, prompt, served, ours, None, None, None, None, delays, None, tuple(causes))


# ------------------------------------------------------------------------------
# Our engine beside a running server: the same model, requests and blocks.
# ------------------------------------------------------------------------------


class _EngineBeside:
    """Serves runs of a server on our engine; the model is loaded once."""

    def __init__(self, study: Study) -> None:
        (name,) = study.chosen()
        pool = study.arms[name].pool
        assert pool is not None, "checked with the settings"
        size = block_shape(
            study.model, held_token_bytes(study.model, study.batch), pool.block_size
        ).size
        self._study = study
        self._strategy = Strategy(family="block_hash", match="block_hash", block_size=size)
        alone = replace(
            study, backend="engine", server=ServerSettings(), analyses=ANALYSES.section()()
        )
        self._engine = RealEngine(replace(alone, arms={name: self._strategy}))

    def reused(self, job: Job) -> dict[int, int]:
        """Return the reused prompt tokens of each request of a run, from an empty cache."""
        reused: dict[int, int] = {}

        def finished(record: Record) -> None:
            reused[record.request_id] = record.reused_tokens

        requests, nowhere = as_served(self._study, job.requests), Path(os.devnull)
        unlogged = replace(
            job, readings=None, outputs=None, serving=None, trace=None, steps=nowhere
        )
        served = replace(unlogged, strategy=self._strategy, requests=requests, seen=None)
        deque(self._engine.run(served, finished), maxlen=0)
        return reused


# ------------------------------------------------------------------------------
# Tables.
# ------------------------------------------------------------------------------

_DELAYS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}


def _share(equal: int | None, total: int | None) -> str:
    return "–" if equal is None or total is None else f"{equal:,} of {total:,}"


def decisions_table(title: str, runs: Sequence[Compared], notes: Sequence[str]) -> Table:
    """A row for each run: how many requests and steps are equal."""
    fields = (
        Field("seed", "seed", count),
        Field("rate_rps", "", hidden),
        Field("requests", "requests", count),
        Field("same_reuse", "", hidden),
        Field(
            "reuse",
            "reused tokens\nequal",
            word,
            lambda row: _share(row["same_reuse"], row["requests"]),
        ),
        Field("same_course", "", hidden),
        Field(
            "course",
            "steps of requests\nequal",
            word,
            lambda row: _share(row["same_course"], row["requests"]),
        ),
        Field("differing_steps", "", hidden),
        Field(
            "steps",
            "steps\nequal",
            word,
            lambda row: _share(
                None if row["steps"] is None else row["steps"] - row["differing_steps"],
                row["steps"],
            ),
        ),
        Field("preemptions", "preemptions\nserver", count),
        Field("our_preemptions", "preemptions\nours", count),
        Field("hit_rate", "token hit rate\nserver", percent),
        Field("our_hit_rate", "token hit rate\nours", percent),
        Field("same_engine", "", hidden),
        Field(
            "engine",
            "reused tokens equal\nin our engine",
            word,
            lambda row: _share(row["same_engine"], row["requests"]),
            empty=("–",),
        ),
        Field("engine_hit_rate", "token hit rate\nin our engine", percent, empty=(None,)),
    )
    return tabulate("rendezvous", title, fields, [run.summary() for run in runs], notes)


def delays_table(runs: Sequence[Compared]) -> Table | None:
    """A row for each delay: the client's, and that of our scheduler under the server's own step
    times."""
    rows = []
    for name, label in _DELAYS.items():
        measured = np.concatenate([getattr(run.measured, name) for run in runs])
        stepped = [getattr(run.stepped, name) for run in runs if run.stepped is not None]
        if np.isnan(measured).all():
            continue
        row: dict[str, Any] = {"delay": label, "mean_s": float(np.nanmean(measured))}
        row |= {f"p{p}_s": float(np.nanpercentile(measured, p)) for p in (50, 95)}
        # unknown without the server's steps
        row |= dict.fromkeys(("our_mean_s", "outside_s", "error"))
        if stepped:
            ours = np.concatenate(stepped)
            row["our_mean_s"] = float(np.nanmean(ours))
            row["outside_s"] = float(np.nanmedian(measured - ours))
            row["error"] = row["our_mean_s"] / row["mean_s"] - 1
        rows.append(row)
    if not rows:
        return None
    fields = (
        Field("delay", "delay", word, left=True),
        Field("mean_s", "server\nmean", seconds),
        Field("p50_s", "server\np50", seconds),
        Field("p95_s", "server\np95", seconds),
        Field("our_mean_s", "ours under its\nsteps, mean", seconds),
        Field("error", "difference", signed_percent),
        Field("outside_s", "outside the\nscheduler, p50", seconds),
    )
    note = (
        "ours under its steps: our decisions, where each step takes what it took in the server; "
        "the rest is HTTP, tokens to text, and the client"
    )
    return tabulate("delays", "Delays of the requests", fields, rows, (note,))


# ------------------------------------------------------------------------------
# The server as it ran.
# ------------------------------------------------------------------------------


def server_table(run: LiveRun) -> Table:
    """The settings that the server told, by name."""
    start = run.start
    equal = Counter(
        (group.kind, group.layers, group.block_size, group.span) for group in start.groups
    )
    groups = ", ".join(
        f"{count} of {layers} layers of {kind}{f' over {span} tokens' if span else ''} in blocks of {size}"
        for (kind, layers, size, span), count in equal.items()
    )
    rows = [
        {"setting": "version", "value": f"vLLM {start.version}"},
        {"setting": "blocks", "value": f"{start.num_blocks:,} of {start.block_size} tokens"},
        {"setting": "groups", "value": groups},
        {"setting": "max_num_seqs", "value": f"{start.max_num_seqs:,}"},
        {"setting": "max_num_batched_tokens", "value": f"{start.max_num_batched_tokens:,}"},
        {"setting": "chunked prefill", "value": _flag(start.enable_chunked_prefill)},
        {"setting": "async scheduling", "value": _flag(start.async_scheduling)},
        {"setting": "prefix caching", "value": _flag(start.prefix_caching)},
        {
            "setting": "drafts",
            "value": f"{start.draft_tokens} ({start.draft_method})"
            if start.draft_tokens
            else "none",
        },
    ]
    fields = (
        Field("setting", "setting", word, left=True),
        Field("value", "value", word, left=True),
    )
    return tabulate("server", "The server as it ran", fields, rows)


def _flag(value: bool) -> str:
    return "on" if value else "off"


@ANALYSES.register("rendezvous", options=RendezvousSettings, check=_check)
def rendezvous(finished: Finished) -> Findings:
    """Compare a running server with our scheduler, request by request."""
    study = finished.study
    jobs = Jobs(study, finished.workload.requests)
    engine = _EngineBeside(study) if study.analyses.rendezvous.engine else None
    runs = []
    for arm, files in finished.files.items():
        columns = files.columns()
        for cell in run_cells(study, arm):
            path = files.log(arm, cell)
            if path.exists():
                served = read_run(path)
                run = _by_steps(study, cell, columns[cell], served)
                if run.broken():  # so that it can be sent, and decided again without a server
                    write_case(served, path.with_suffix(".case.json"))
            else:
                run = _by_simulation(study, cell, columns[cell], jobs.job(arm, cell, files))
            if engine is not None:
                job = jobs.job(arm, cell, files)
                reused = engine.reused(job)
                computed = np.array([reused[int(n)] for n in columns[cell]["request_id"]], float)
                causes = run.causes
                # a difference with several requests at once depends on times
                if job.clients != 1 and not np.array_equal(computed, run.served):
                    causes = (*causes, _SEVERAL)
                run = replace(run, computed=computed, causes=tuple(dict.fromkeys(causes)))
            runs.append(run)
    notes = [f"seed {run.cell.seed}: {cause}" for run in runs for cause in run.causes]
    notes += [
        f"{name}: {FAULTS[name].sentence}"
        for name in dict.fromkeys(f for run in runs for f in run.faults)
    ]
    title = f"{finished.name} · a running server and our scheduler\n{footer(finished)}"
    tables = [decisions_table(title, runs, notes)]
    if (delays := delays_table(runs)) is not None:
        tables.append(delays)
    logs = (
        files.log(arm, cell)
        for arm, files in finished.files.items()
        for cell in run_cells(study, arm)
    )
    if (written := next((log for log in logs if log.exists()), None)) is not None:
        tables.append(server_table(read_run(written)))
    accepted = set(study.analyses.rendezvous.accept)
    broken = dict.fromkeys(
        name for run in runs if not accepted.intersection(run.faults) for name in run.broken()
    )
    return Findings(
        summary={"rendezvous": {"runs": [run.summary() for run in runs], "broken": list(broken)}},
        tables=tuple(tables),
    )
