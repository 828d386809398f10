"""Runs of `replay` and `rendezvous` as logs of a twin.

The prompts are those of the run's own workload, made again from its settings. The times are those
of the client. The pool is that of the server where it wrote its steps, else that of the run's
settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from spanlab.analyses.twin_log import (
    LIMITS,
    Described,
    Floats,
    Outside,
    Steps,
    TimedLog,
    check_split,
)
from spanlab.build import build_workload
from spanlab.core.policies.block_pool import block_shape
from spanlab.core.request import Request
from spanlab.records import NS, delays_of
from spanlab.settings.arms import leaves
from spanlab.settings.composition import as_settings, open_schema
from spanlab.settings.server import SERVER, held_token_bytes
from spanlab.settings.study import Study
from spanlab.study.folder import CONFIG, fingerprint, read_settings
from spanlab.study.jobs import Jobs
from spanlab.study.numbers import ArmFiles, Columns, RunCell
from spanlab.study.servers.base import as_served
from spanlab.study.servers.steps import (
    LiveRun,
    Rendezvous,
    Served,
    Start,
    meet,
    other_release,
    read_run,
)

# settings that repeats of a run have in common
_SAME = ("workload", "arrivals", "model", "batch", "data")
_PRESET = "vllm_0_32"  # the rules that decide the server's steps again
_STEPS, _CONFIG = "the server's log of steps", "the run's settings"


@dataclass(frozen=True, eq=False)
class Capture:
    """One run of a server.

    `name`       of its folder, and of the run where the folder has several
    `log`        its requests, with prompts
    `described`  what it says of its server
    `settings`   settings, by section, that are equal in repeats; `cell` has seed, rate and blocks
    `digest`     hash of its times: a capture is never both fitted and predicted
    """

    name: str
    log: TimedLog
    described: Described
    settings: Mapping[str, Any]
    digest: str

    def differs_from(self, other: Capture) -> str:
        """Return in what the settings differ: load, cache, workload, batch; `repeat` where they do
        not."""
        names = {"arrivals": "load", "rate_rps": "load", "memory": "cache", "data": "workload"}
        keys = [key for key in self.settings if self.settings[key] != other.settings[key]]
        return ", ".join(dict.fromkeys(names.get(key, key) for key in keys)) or "repeat"


def is_run(path: str) -> bool:
    """Return whether a path is the folder of a run with records."""
    return (Path(path) / CONFIG).is_file() and (Path(path) / "records").is_dir()


def read_captures(path: str, key: str, study: Study) -> list[Capture]:
    """Return the runs of a server in a folder; ValueError where it has none, or one that cannot be
    simulated.

    `key`    names the path in messages
    `study`  the twin's, whose model the server must have
    """
    folder, subject = Path(path), f"{key}={path}"
    if not is_run(path):
        raise ValueError(
            f"{subject}: expected the folder of a run of replay or rendezvous, whose prompts are known"
        )
    text = (folder / CONFIG).read_text()
    config: Any = OmegaConf.merge(OmegaConf.structured(open_schema(Study)), OmegaConf.create(text))
    try:
        run = as_settings(config)
    except ValueError as error:
        raise ValueError(
            f"{subject}: expected settings that this version knows: {error}"
        ) from error
    assert isinstance(run, Study), "the schema is that of a study"
    if run.backend != SERVER:
        raise ValueError(
            f"{subject}: a run with backend={run.backend}; expected one of a server, backend={SERVER}"
        )
    there, here = (dict(leaves(asdict(spec))) for spec in (run.model, study.model))
    for name in here:
        if there.get(name) != here[name]:
            raise ValueError(
                f"{subject}: its server had model.{name}={there.get(name)}; expected {here[name]}"
            )
    (arm,) = run.chosen()
    try:
        workload = build_workload(run.workload, str(Path(run.output.root) / ".cache"))
    except ValueError as error:
        raise ValueError(f"{subject}: its prompts cannot be made again: {error}") from error
    settings = read_settings(text)
    if fingerprint(workload) != settings["data"]:
        raise ValueError(
            f"{subject}: its workload has other prompts now; expected those that the server got"
        )
    files = ArmFiles.of_arm(folder, arm)
    if damage := files.corruption():
        raise ValueError(damage)
    rows = {RunCell.of(row): row for row in files.finished()}
    runs = [
        _Run(run, subject, arm, cell, rows[cell], columns, files)
        for cell, columns in files.columns().items()
    ]
    if not runs:
        raise ValueError(f"{subject}: expected a finished run")
    jobs, same = Jobs(run, workload.requests), {name: settings.get(name) for name in _SAME}
    share, several = study.analyses.twin.train_share, len(runs) > 1
    return [each.capture(jobs, same, share, several) for each in runs]


@dataclass(frozen=True, eq=False)
class _Run:
    """A run as it lies in its folder: the line of its totals, and the columns of its records."""

    study: Study
    subject: str
    arm: str
    cell: RunCell
    row: Mapping[str, Any]
    unordered: Columns
    files: ArmFiles

    def capture(
        self, jobs: Jobs, same: Mapping[str, Any], train_share: float, several: bool
    ) -> Capture:
        if self.row.get("failures"):
            raise ValueError(
                f"{self.subject}: {len(self.row['failures'])} requests failed; expected none"
            )
        # The lateness of the client is none of the server's: delays count from the time of sending,
        # where it is known.
        columns = self.unordered | {
            "arrived_s": self.unordered.get("sent_s", self.unordered["arrived_s"])
        }
        order = np.lexsort((columns["request_id"], columns["arrived_s"]))
        columns = {name: values[order] for name, values in columns.items()}
        by_id = {
            request.id: request
            for request in as_served(self.study, jobs.arrivals(self.cell.first_repeat))
        }
        requests = [by_id[int(number)] for number in columns["request_id"]]
        path = self.files.log(self.arm, self.cell)
        live = read_run(path) if path.exists() else None
        log, described = self._log(columns, requests, train_share), self._described()
        if live is not None:
            log = self._with_steps(log, columns["request_id"], live)
            described = _of_start(described, live.start)
        elif log.reused is not None and (log.reused < 0).any():
            raise ValueError(
                f"{self.subject}: the server told no reused tokens; expected cached_tokens or its steps"
            )
        check_split(log.trains, train_share, self.subject.partition("=")[2])
        name = Path(self.subject.partition("=")[2]).resolve().name
        return Capture(
            f"{name}, {self.cell.name}" if several else name,
            log,
            described,
            {
                **same,
                "seed": self.cell.seed,
                "rate_rps": self.cell.rate_rps,
                "memory": described.meta,
            },
            sha256(log.ttft_s.tobytes() + log.e2e_s.tobytes()).hexdigest(),
        )

    def _log(self, columns: Columns, requests: Sequence[Request], train_share: float) -> TimedLog:
        arrived_s, outputs = columns["arrived_s"], columns["output_tokens"].astype(np.int64)
        delays = delays_of(columns)
        numbered = (
            replace(
                request,
                id=number,
                arrived_at=round(at * 1e9),
                output_len=output,
                after=(),
                wait_ns=0,
            )
            for number, (request, at, output) in enumerate(
                zip(requests, arrived_s, outputs.tolist(), strict=True)
            )
        )
        notes = []
        if self.study.arrivals.clients is not None or any(request.after for request in requests):
            notes.append(
                "requests arrived after answers to others: measured arrivals are used, none is predicted"
            )
        return TimedLog(
            tuple(numbered),
            arrived_s,
            delays["ttft_s"],
            delays["e2e_s"],
            outputs,
            np.arange(len(outputs)) < round(train_share * len(outputs)),
            tuple(notes),
            np.nan_to_num(columns["reused_tokens"].astype(float), nan=-1).astype(np.int64),
        )

    def _described(self) -> Described:
        """Return what the settings of the run say of the server."""
        study, pool = self.study, self.study.arms[self.arm].pool
        if pool is None:
            raise ValueError(
                f"{self.subject}: only={study.runs.only}: expected a server with a pool of blocks"
            )
        shape = block_shape(
            study.model, held_token_bytes(study.model, study.batch), pool.block_size
        )
        blocks = shape.pool(shape.limit(study.store.budget)).num_blocks
        limits = {name: getattr(study.batch, name) for name in LIMITS}
        meta = {
            "engine_kwargs": limits | {"async_scheduling": study.batch.async_scheduling},
            "kv_cache": {"block_size": shape.size, "num_gpu_blocks": blocks + 1},  # the null block
        }
        retention = pool.retention
        return Described(
            meta, _CONFIG, study.batch, True, retention, study.server.engine == "vllm_cpu"
        )

    def _with_steps(self, log: TimedLog, ids: NDArray[np.int64], live: LiveRun) -> TimedLog:
        """Return the log with what the server wrote of its steps: reuse, outputs, durations and
        delays outside."""
        if live.start.draft_tokens:
            raise ValueError(
                f"{self.subject}: the server verified drafts; expected one without speculative decoding"
            )
        at = {served.number: served for served in live.requests}
        served = [at[int(number)] for number in ids]
        requests = tuple(map(self._answered, log.requests, served))
        reused = np.array([other.reused or 0 for other in served], np.int64)
        both = meet(live, _PRESET, self.study.model.state_bytes)
        notes = [*log.notes, *other_release(live, _PRESET)]
        if both.differences:
            count = f"{len(both.differences):,} of {both.num_steps:,} steps of the server are not those of the preset"
            notes.append(f"{count}: they are left out of the fit")
        added_s = np.array([other.added_at for other in served]) * NS
        began_s = self.row.get("began_s")
        zero_s = float((added_s - log.arrived_s).min()) if began_s is None else began_s
        clock = _Clock(live, zero_s)
        first_s = clock.ended_s[[other.first or 0 for other in served]]
        idle = clock.idle(log.arrived_s, added_s - zero_s) & log.trains
        if not idle.any():
            notes.append(
                "no fitted request found the server idle: the delay before its queue counts as none"
            )
        outside = Outside(
            (added_s - zero_s - log.arrived_s)[idle] if idle.any() else np.zeros(1),
            (log.arrived_s + log.ttft_s - first_s)[log.trains],
        )
        steps = clock.steps(both, float(log.arrived_s[~log.trains].min(initial=np.inf)))
        return replace(
            log, requests=requests, reused=reused, notes=tuple(notes), outside=outside, steps=steps
        )

    def _answered(self, request: Request, served: Served) -> Request:
        """Return a request with the tokens of its answer; ValueError where the server got another
        prompt."""
        if request.tokens.tolist() != served.tokens:
            raise ValueError(
                f"{self.subject}: request {served.id} had another prompt; expected that of the workload"
            )
        known = len(served.output) == request.output_len
        return replace(request, output=np.array(served.output, np.int32)) if known else request


def _of_start(described: Described, start: Start) -> Described:
    """Return the description with what the server's scheduler was made with."""
    engine = {name: getattr(start, name) for name in LIMITS} | {
        "async_scheduling": start.async_scheduling,
        "enable_prefix_caching": start.prefix_caching,
    }
    pool = {"block_size": start.block_size, "num_gpu_blocks": start.num_blocks}
    assert described.batch is not None, "the run's settings have it"
    batch = replace(
        described.batch,
        enable_chunked_prefill=start.enable_chunked_prefill,
        long_prefill_token_threshold=start.long_prefill_token_threshold,
    )
    meta = {"engine_kwargs": engine, "kv_cache": pool}
    eager = described.eager if start.cuda_graphs is None else not start.cuda_graphs
    return replace(
        described, meta=meta, origin=_STEPS, batch=batch, retention=start.retention, eager=eager
    )


class _Clock:
    """Times of a server's steps on the clock of the arrivals, float64 seconds, by number of the
    step.

    A step lasts until the next one begins, if a request is left to serve: the server then handles
    its outputs. With asynchronous scheduling, it begins when the one before it ends.
    """

    def __init__(self, live: LiveRun, zero_s: float) -> None:
        self.began_s = np.array([step.began for step in live.steps]) * NS - zero_s
        self.ended_s = np.array([step.ended for step in live.steps]) * NS - zero_s
        if live.start.async_scheduling:
            self.began_s[1:] = np.maximum(self.began_s[1:], self.ended_s[:-1])
            return
        added_s = np.sort([request.added_at * NS - zero_s for request in live.requests])
        ends = np.sort(
            [len(live.steps) if request.last is None else request.last for request in live.requests]
        )
        left = np.searchsorted(added_s, self.ended_s, side="right") - np.searchsorted(
            ends, np.arange(len(live.steps)), side="right"
        )
        goes_on = left[:-1] > 0
        self.ended_s[:-1][goes_on] = self.began_s[1:][goes_on]

    def idle(self, arrived_s: Floats, queued_s: Floats) -> NDArray[np.bool_]:
        """Return whether no step ran between the arrival and the queueing of each request."""
        before = np.searchsorted(self.began_s, arrived_s, side="right") - 1
        ended = (before < 0) | (self.ended_s[np.maximum(before, 0)] <= arrived_s)
        return np.asarray(ended & (np.searchsorted(self.began_s, queued_s) - 1 <= before))

    def steps(self, both: Rendezvous, until_s: float) -> Steps:
        """Return the steps that both schedulers decided alike; those that end by `until_s` are for
        training."""
        unequal = {difference.step for difference in both.differences}
        numbers = [
            number
            for number in sorted(both.work)
            if number < len(self.ended_s) and number not in unequal
        ]
        seconds = (self.ended_s - self.began_s)[numbers]
        work = tuple(both.work[number] for number in numbers)
        return Steps(work, seconds, np.asarray(self.ended_s[numbers] <= until_s))
