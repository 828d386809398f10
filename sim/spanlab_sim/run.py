"""One run: one arm, one seed, one load, from the first arrival to the last token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import simpy
from simpy.rt import RealtimeEnvironment

from spanlab.core.async_scheduler import make_scheduler
from spanlab.core.backend import Backend
from spanlab.core.batch_rules import BatchRules
from spanlab.core.protocol import Policy
from spanlab.core.request import Request
from spanlab.core.scheduler import Sequence
from spanlab.core.step_features import SpanReads
from spanlab.metrics import CacheUsage, as_record, as_round
from spanlab.records import Record, RunRow
from spanlab_sim.backend import ModelledBackend
from spanlab_sim.replica import OnStep, Replica
from spanlab_sim.server import Server
from spanlab_sim.source import Source
from spanlab_sim.timing import TimingModel

#: Environments by clock. Virtual time passes as steps report it and skips idle time; wall time waits for arrivals.
CLOCKS: dict[str, Callable[[], simpy.Environment]] = {
    "virtual": simpy.Environment,
    "wall": lambda: RealtimeEnvironment(factor=1e-9, strict=False),
}


def serve(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    backend: Backend,
    on_record: Callable[[Record], None],
    *,
    seed: int = 0,
    rate_rps: float | None = None,
    warmup: int = 0,
    group: int | None = None,
    clients: int | None = None,
    clock: str = "virtual",
    on_step: OnStep = lambda step, now, result: None,
) -> RunRow:
    """Serve `requests`, sorted by arrival; the first `warmup` of them are recorded as not counted.

    `clients`  most requests in flight, as for `Server`.
    `group`    the group whose visits and checkpoints are noted one by one in the row.
    `clock`    a key of `CLOCKS`.
    """
    scheduler = make_scheduler(policy, rules)
    gauge = CacheUsage(policy)
    env = CLOCKS[clock]()
    order = {request.id: rank for rank, request in enumerate(requests)} if warmup else {}
    rounds: list[dict[str, int | list[int]]] = []
    preemptions = 0

    def finished(sequence: Sequence) -> None:
        nonlocal preemptions
        preemptions += sequence.preemptions
        counted = order.get(sequence.request.id, warmup) >= warmup
        on_record(as_record(sequence, policy, seed, rate_rps, counted))
        if sequence.request.group_id == group:
            rounds.append(as_round(sequence, policy, len(rounds)))

    replica = Replica(env, scheduler, backend, finished, on_step, gauge.advance)
    Server(env, Source(requests, clients), [replica]).run()
    gauge.advance(int(env.now))
    row = gauge.row(seed, rate_rps, len(requests), preemptions, replica.busy_ns, replica.steps)
    row.group_rounds.extend(rounds)
    return row


def simulate(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    timing: TimingModel,
    on_record: Callable[[Record], None],
    *,
    jump: bool = True,
    reads: SpanReads | None = None,
    seed: int = 0,
    rate_rps: float | None = None,
    warmup: int = 0,
    group: int | None = None,
    clients: int | None = None,
    on_step: OnStep = lambda step, now, result: None,
) -> RunRow:
    """`serve` by a timing model; `jump` and `reads` as for `ModelledBackend`."""
    backend = ModelledBackend(timing, policy.store.state_bytes, jump, policy.rules, reads)
    return serve(
        requests,
        policy,
        rules,
        backend,
        on_record,
        seed=seed,
        rate_rps=rate_rps,
        warmup=warmup,
        group=group,
        clients=clients,
        on_step=on_step,
    )
