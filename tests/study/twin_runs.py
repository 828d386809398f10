"""Folders of runs of a server with known rates, as `rendezvous` writes them: settings, records, and the server's steps.

The loop of the server is separate from that of the simulator, which the twin uses: only the scheduler, the policy and
the timing model are the same.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.build import build_workload
from spanlab.cli import compose
from spanlab.core.ahead import make_scheduler
from spanlab.core.policies.block_pool import BlockPool, BlockRules, BlockStore
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.request import Request
from spanlab.core.step import ScheduledSequence, ScheduledStep, features, finished_prompts
from spanlab.records import NS, ServedRecord, ServedRun
from spanlab.settings.study import Study
from spanlab.study.folder import as_yaml
from spanlab.study.jobs import Jobs
from spanlab.study.numbers import RunCell
from spanlab.study.servers.base import as_served
from spanlab_sim.timings import Deployment, FittedTiming, Rates

from .twin_logs import DEVICE, MODEL, RATES

ZERO_S = 1234.5  # of the records, on the clock of the steps
PROMPTS = (
    "workload=synthetic",
    "workload.output_tokens=8",
    "workload.synthetic.groups=8",
    "workload.synthetic.requests_per_group=15",
    "workload.synthetic.prompt_tokens=1400",
    "workload.synthetic.kind=fixed",
    "workload.synthetic.unit=tokens",
    "workload.synthetic.value=1200",
)


@dataclass
class Server:
    """A server: blocks of its pool, the null block among them, rates, and delays outside of its steps.

    `noise`  standard deviation of the logarithm of a step's duration, drawn with `seed`
    `swing`  the machine is up to this share slower and faster, in waves of 10 seconds
    """

    blocks: int = 2000
    block_size: int = 16
    rates: Rates = RATES
    noise: float = 0.0
    seed: int = 0
    swing: float = 0.0
    before_s: float = 0.003
    after_s: float = 0.002

    def policy(self, study: Study) -> BlockPolicy:
        groups = study.model.state_groups
        rules = BlockRules(self.block_size, "align" if groups else "none", groups)
        return BlockPolicy(rules, BlockStore(BlockPool(self.blocks - 1), 1, 1))


def study_of(*words: str) -> Study:
    given = ("server.engine=none", "base_url=http://127.0.0.1:1", f"model={MODEL}", f"hardware={DEVICE}")
    limits = ("batch.max_num_batched_tokens=1024", "batch.max_num_seqs=16", "arms.vllm_0_32.pool.block_size=16")
    study = compose("rendezvous", [*given, *limits, *PROMPTS, *words])
    assert isinstance(study, Study)
    return study


def write_run(folder: Path, server: Server, *words: str, steps: bool = True, drop: Sequence[str] = ()) -> Path:
    """Serve a workload and write the folder of its run; `drop` names fields that records lack."""
    study = study_of(*words)
    workload = build_workload(study.workload, str(folder.parent / ".cache"))
    (seed,), rate = study.runs.seeds, study.arrivals.rate_rps
    requests = as_served(study, Jobs(study, workload.requests).arrivals(RunCell(seed, rate)))
    requests = [replace(request, output=np.arange(request.output_len, dtype=np.int32)) for request in requests]
    ended, events = serve(study, server, requests)
    for name in ("records", "runs", "steps"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(as_yaml(asdict(study), workload))
    records = [_record(sequence, server, seed, rate) for sequence in ended]
    rows = [{name: value for name, value in asdict(record).items() if name not in drop} for record in records]
    _write(folder / "records" / "vllm_0_32.jsonl", rows)
    end = (folder / "records" / "vllm_0_32.jsonl").stat().st_size
    last = max(record.finished_s for record in records)
    row = ServedRun(seed, rate, len(rows), last, 0.0, 0.0, {}, 0, ZERO_S)
    _write(folder / "runs" / "vllm_0_32.jsonl", [asdict(row) | {"records_end": end}])
    if steps:
        _write(folder / "steps" / f"vllm_0_32-{RunCell(seed, rate).name}.jsonl", [_start(study, server), *events])
    return folder


def serve(
    study: Study, server: Server, requests: Sequence[Request]
) -> tuple[list[ScheduledSequence], list[dict[str, Any]]]:
    """Return the ended sequences and the events of the log of steps."""
    timing = FittedTiming(study.model, study.hardware, Deployment(cuda_graphs=False), server.rates)
    random, delay = np.random.default_rng(server.seed), round(server.before_s * 1e9)
    scheduler = make_scheduler(server.policy(study), study.batch)
    waiting = deque(sorted(requests, key=lambda request: request.arrived_at))
    ended: list[ScheduledSequence] = []
    events: list[dict[str, Any]] = []
    now = 0
    while waiting or not scheduler.idle:
        if scheduler.idle:
            now = max(now, waiting[0].arrived_at + delay)
        while waiting and waiting[0].arrived_at + delay <= now:
            request = waiting.popleft()
            scheduler.add(request)
            events.append(_event("add", now, id=_id(request), tokens=request.tokens.tolist()) | _rest(request))
        scheduler.enqueue_added()
        step = scheduler.schedule(now)
        assert step is not None, "a request waits or runs"
        work = features(step, study.model.state_bytes)
        ratio = random.lognormal(-(server.noise**2) / 2, server.noise)
        ratio *= 1 + server.swing * math.sin(2 * math.pi * now * NS / 10)
        until = now + int(timing.exact([work]) * ratio)
        events += _of_step(step, now, until)
        finished = finished_prompts(step)
        finished += [s for s in step.decodes if s.generated + 1 >= s.request.output_len]
        scheduler.complete(step, until, finished)
        ended += finished
        now = until
    return ended, events


def _rest(request: Request) -> dict[str, Any]:
    return {"output_len": request.output_len, "priority": 0, "salt": request.cache_salt or None}


def _id(request: Request) -> str:
    return f"cmpl-{request.id}-0"


def _at(time_ns: int) -> int:
    return time_ns + round(ZERO_S * 1e9)


def _event(name: str, time_ns: int, **values: Any) -> dict[str, Any]:
    return {"event": name, "at": _at(time_ns), **values}


def _of_step(step: ScheduledStep, began: int, until: int) -> list[dict[str, Any]]:
    tokens = {_id(chunk.sequence.request): chunk.tokens for chunk in step.chunks}
    tokens |= {_id(sequence.request): 1 for sequence in step.decodes}
    starts = [chunk.sequence for chunk in step.chunks if chunk.start == chunk.sequence.first_plan.resume]
    reused = {_id(sequence.request): sequence.first_plan.resume for sequence in starts if not sequence.preemptions}
    makers = [chunk.sequence for chunk in step.chunks if chunk.last] + list(step.decodes)
    made = {_id(sequence.request): [sequence.generated] for sequence in makers}
    rest = {"resumed": {}, "preempted": [], "drafts": {}}
    plan = _event("plan", began, began=_at(began), tokens=tokens, reused=reused, **rest)
    return [plan, _event("done", until, began=_at(until), tokens=made)]


def _start(study: Study, server: Server) -> dict[str, Any]:
    batch, states = study.batch, study.model.state_groups
    full = {"kind": "FullAttentionSpec", "block_size": server.block_size, "page_bytes": 1, "layers": 1}
    return _event(
        "start",
        0,
        version="0.32.0",
        num_blocks=server.blocks,
        block_size=server.block_size,
        groups=[full, *([full | {"kind": "MambaSpec"}] * states)],
        max_num_seqs=batch.max_num_seqs,
        max_num_batched_tokens=batch.max_num_batched_tokens,
        max_model_len=8192,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=0,
        policy="fcfs",
        async_scheduling=False,
        prefix_caching=True,
        mamba_mode="align" if states else "none",
        retention=0,
        draft_method=None,
        draft_tokens=0,
        cuda_graphs=False,
    )


def _record(sequence: ScheduledSequence, server: Server, seed: int, rate: float | None) -> ServedRecord:
    request, plan = sequence.request, sequence.first_plan
    assert plan is not None, "it has started"
    first, last = (time * NS + server.after_s for time in (sequence.first_token_at, sequence.finished_at))
    counts = request.num_tokens, request.output_len, plan.resume
    arrived = request.arrived_at * NS
    return ServedRecord(seed, rate, request.id, request.group_id, True, arrived, first, last, *counts, arrived)


def _write(path: Path, rows: Sequence[Any]) -> None:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
