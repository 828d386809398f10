"""One run: one arm, one seed, one load, from the first arrival to the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Ordered
from functools import partial
from typing import Any, TypedDict, Unpack

import simpy
from simpy.rt import RealtimeEnvironment

from spanlab.core.admission import BatchRules
from spanlab.core.async_scheduler import make_scheduler
from spanlab.core.policies.tiered import OverTiers
from spanlab.core.protocol import Arranger, PassageRules, Policy
from spanlab.core.request import Request
from spanlab.core.step import Backend, ScheduledSequence
from spanlab.core.step_features import SpanReads
from spanlab.metrics import CacheUsage, Recorder, as_round
from spanlab.records import ArrangedRecord, Record, ReplicaRow, RoutedRecord, RunRow
from spanlab_sim.backend import ModelledBackend
from spanlab_sim.routing import Route
from spanlab_sim.server import OnStep, Replica, Server, Source, route_to_first
from spanlab_sim.timing import TimingModel

#: Environments by clock. Virtual time passes as steps report it and skips idle time; wall time waits for arrivals.
CLOCKS: dict[str, Callable[[], simpy.Environment]] = {
    "virtual": simpy.Environment,
    "wall": lambda: RealtimeEnvironment(factor=1e-9, strict=False),
}
MakeRoute = Callable[[Ordered[Replica]], Route]


class RunOptions(TypedDict, total=False):
    """Options of every run."""

    seed: int
    rate_rps: float | None
    warmup: int
    group: int | None
    clients: int | None
    on_step: OnStep
    passages: PassageRules | None
    seen: Mapping[int, int] | None


class SimulationOptions(RunOptions, total=False):
    """Options of `simulate_all` for one engine."""

    jump: bool
    reads: SpanReads | None
    loads: OverTiers[Any] | None


def _prepare(
    requests: Ordered[Request],
    engines: Ordered[tuple[Policy, Backend]],
    rules: BatchRules,
    on_record: Callable[[Record], None],
    *,
    route: MakeRoute = lambda replicas: route_to_first,
    seed: int = 0,
    rate_rps: float | None = None,
    warmup: int = 0,
    group: int | None = None,
    clients: int | None = None,
    clock: str = "virtual",
    loads: OverTiers[Any] | None = None,
    on_step: OnStep = lambda step, now, result: None,
    passages: PassageRules | None = None,
    seen: Mapping[int, int] | None = None,
) -> tuple[Server, Callable[[], RunRow]]:
    """Return the server of a run, and the function that returns the run's row once it has served.

    `requests` are sorted by arrival and served by one or more engines; the first `warmup` to arrive are not counted.

    `route`    makes the router of the replicas.
    `clients`  most requests in flight, as for `Source`.
    `group`    the group whose visits and checkpoints are noted one by one in the row.
    `clock`    a key of `CLOCKS`.
    `loads`    the policy over lower tiers, for one engine alone; None where there are no tiers.
    `passages` selects and orders passages, for one engine alone; records then have the order. None: as given.
    `seen`     the longest seen prefix of each request by id, for passages as given; None: found in the run.
    """
    assert passages is None or len(engines) == 1, "replicas would serve passages in different orders"
    usage = CacheUsage([policy.store for policy, _ in engines])
    env, source = CLOCKS[clock](), Source(requests, clients, warmup)
    recorder = Recorder(seed, rate_rps, seen if passages is None else None)
    rounds: list[dict[str, int | list[int]]] = []
    replica_rows = [ReplicaRow() for _ in engines]
    arranger = None if passages is None else Arranger(passages, engines[0][0])

    def arrived(request: Request, now: int) -> Request:
        request = request if arranger is None else arranger(request, now)
        recorder.arrived(request)
        return request

    def finished(number: int, policy: Policy, sequence: ScheduledSequence) -> None:
        counted = sequence.request.id not in source.early
        record = recorder.record(sequence, policy, counted)
        replica_rows[number].add(record)
        if arranger is not None:
            record = ArrangedRecord.of(record, arranger.take_order(record.request_id))
        on_record(record if len(replica_rows) == 1 else RoutedRecord.of(record, number))
        if sequence.request.group_id == group:
            rounds.append(as_round(sequence, policy, len(rounds)))

    replicas = [
        Replica(
            env,
            make_scheduler(policy, rules),
            backend,
            partial(finished, number, policy),
            on_step,
            partial(usage.advance, number),
            loads,
            arrived,
        )
        for number, (policy, backend) in enumerate(engines)
    ]
    server = Server(env, source, replicas, route(replicas))

    def row() -> RunRow:
        for number in range(len(engines)):
            usage.advance(number, int(env.now))
        for replica_row, replica in zip(replica_rows, replicas, strict=True):
            replica_row.busy_s, replica_row.steps = replica.busy_ns * 1e-9, replica.steps
        preemptions = sum([row.preemptions for row in replica_rows])
        busy_ns, steps = sum([replica.busy_ns for replica in replicas]), sum([replica.steps for replica in replicas])
        row = usage.row(seed, rate_rps, len(requests), preemptions, busy_ns, steps)
        row.group_rounds.extend(rounds)
        if len(replica_rows) > 1:
            row.replicas.extend(replica_rows)
        return row

    return server, row


def serving(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    backend: Backend,
    on_record: Callable[[Record], None],
    *,
    clock: str = "virtual",
    **options: Unpack[RunOptions],
) -> Generator[None, None, RunRow]:
    """Serve requests by one engine, and return the row of the run; yield at each of `Server.pauses`."""
    server, row = _prepare(requests, [(policy, backend)], rules, on_record, clock=clock, **options)
    yield from server.pauses()
    return row()


def serve(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    backend: Backend,
    on_record: Callable[[Record], None],
    *,
    clock: str = "virtual",
    **options: Unpack[RunOptions],
) -> RunRow:
    """Run `serving` without pauses."""
    server, row = _prepare(requests, [(policy, backend)], rules, on_record, clock=clock, **options)
    server.run()
    return row()


def simulate_all(
    requests: Ordered[Request],
    policies: Ordered[Policy],
    rules: BatchRules,
    timing: TimingModel,
    on_record: Callable[[Record], None],
    *,
    route: MakeRoute = lambda replicas: route_to_first,
    jump: bool = True,
    reads: SpanReads | None = None,
    loads: OverTiers[Any] | None = None,
    **options: Unpack[RunOptions],
) -> RunRow:
    """Serve requests with a timing model, an engine per policy; `jump` and `reads` as for `ModelledBackend`."""
    engines = [
        (policy, ModelledBackend(timing, policy.store.state_bytes, jump, policy.rules, reads, rules.speculation))
        for policy in policies
    ]
    server, row = _prepare(requests, engines, rules, on_record, route=route, loads=loads, **options)
    server.run()
    return row()


def simulate(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    timing: TimingModel,
    on_record: Callable[[Record], None],
    **options: Unpack[SimulationOptions],
) -> RunRow:
    """Run `simulate_all` with one engine."""
    return simulate_all(requests, [policy], rules, timing, on_record, **options)
