"""One run: one arm, one seed, one load, from the first arrival to the last token."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any

import simpy
from simpy.rt import RealtimeEnvironment

from spanlab.core.admission import BatchRules
from spanlab.core.async_scheduler import make_scheduler
from spanlab.core.policies.tiered import OverTiers
from spanlab.core.protocol import Arranger, PassageRules, Policy
from spanlab.core.request import Request
from spanlab.core.step import Backend, ScheduledSequence, ScheduledStep, StepResult
from spanlab.core.step_features import SpanReads
from spanlab.metrics import CacheUsage, Recorder, as_round
from spanlab.records import NS, ArrangedRecord, Record, ReplicaRow, RoutedRecord, RunRow
from spanlab_sim.backend import ModelledBackend
from spanlab_sim.routing import Route
from spanlab_sim.server import OnStep, Replica, Server, Source, no_note, route_to_first
from spanlab_sim.timing import TimingModel

#: Environments by clock. Virtual time passes as steps report it and skips idle time; wall time waits for arrivals.
CLOCKS: dict[str, Callable[[], simpy.Environment]] = {
    "virtual": simpy.Environment,
    "wall": lambda: RealtimeEnvironment(factor=1e-9, strict=False),
}
MakeRoute = Callable[[Ordered[Replica]], Route]


@dataclass(frozen=True)
class RunSpec:
    """One run of one arm: its requests, sorted by arrival, the rules of its batches, and its conditions.

    `warmup`    the first requests to arrive, which are not counted
    `group`     the group whose visits and checkpoints are noted one by one in the row
    `clients`   most requests in flight, as for `Source`
    `clock`     a key of `CLOCKS`
    `passages`  selects and orders passages, for one engine alone; records then have the order. None: as given
    `seen`      the longest seen prefix of each request by id, for passages as given; None: found in the run
    """

    requests: Ordered[Request]
    rules: BatchRules
    seed: int = 0
    rate_rps: float | None = None
    warmup: int = 0
    group: int | None = None
    clients: int | None = None
    clock: str = "virtual"
    passages: PassageRules | None = None
    seen: Mapping[int, int] | None = None


class Run:
    """One run by one or more engines, which observes its replicas; ready to serve."""

    def __init__(
        self,
        spec: RunSpec,
        engines: Ordered[tuple[Policy, Backend]],
        on_record: Callable[[Record], None],
        *,
        on_step: OnStep = no_note,
        route: MakeRoute = lambda replicas: route_to_first,
        loads: OverTiers[Any] | None = None,
    ) -> None:
        """`route` makes the router of the replicas; `loads` is the policy over lower tiers, for one engine alone."""
        assert spec.passages is None or len(engines) == 1, "replicas would serve passages in different orders"
        self._spec, self._on_record, self._on_step = spec, on_record, on_step
        self._policies = [policy for policy, _ in engines]
        self._env, self._source = CLOCKS[spec.clock](), Source(spec.requests, spec.clients, spec.warmup)
        self._usage = CacheUsage([policy.store for policy in self._policies])
        self._recorder = Recorder(spec.seed, spec.rate_rps, spec.seen if spec.passages is None else None)
        self._rounds: list[dict[str, int | list[int]]] = []
        self._rows = [ReplicaRow() for _ in engines]
        self._arranger = None if spec.passages is None else Arranger(spec.passages, self._policies[0])
        self._replicas = [
            Replica(self._env, make_scheduler(policy, spec.rules), backend, self, number=number, loads=loads)
            for number, (policy, backend) in enumerate(engines)
        ]
        self._server = Server(self._env, self._source, self._replicas, route(self._replicas))

    def serving(self) -> Generator[None, None, RunRow]:
        """Serve all requests, and return the row of the run; yield at each of `Server.pauses`."""
        yield from self._server.pauses()
        return self._row()

    def serve(self) -> RunRow:
        """Serve all requests without pauses, and return the row of the run."""
        self._server.run()
        return self._row()

    def _row(self) -> RunRow:
        spec, replicas = self._spec, self._replicas
        for number in range(len(replicas)):
            self._usage.advance(number, int(self._env.now))
        for replica_row, replica in zip(self._rows, replicas, strict=True):
            replica_row.busy_s, replica_row.steps = replica.busy_ns * NS, replica.steps
        preemptions = sum([row.preemptions for row in self._rows])
        busy_ns, steps = sum([replica.busy_ns for replica in replicas]), sum([replica.steps for replica in replicas])
        row = self._usage.row(spec.seed, spec.rate_rps, len(spec.requests), preemptions, busy_ns, steps)
        row.group_rounds.extend(self._rounds)
        if len(self._rows) > 1:
            row.replicas.extend(self._rows)
        return row

    # -- what the replicas tell ---------------------------------------------------------------------------------------

    def arrived(self, request: Request, now: int) -> Request:
        """Return the request as it is served, with its passages arranged, and note it."""
        if self._arranger is not None:
            request = self._arranger(request, now)
        self._recorder.arrived(request)
        return request

    def changing(self, replica: int, now: int) -> None:
        """Advance the resident bytes to the time before a change."""
        self._usage.advance(replica, now)

    def ran(self, step: ScheduledStep, now: int, result: StepResult) -> None:
        """Pass the step on."""
        self._on_step(step, now, result)

    def stored(self, step: ScheduledStep) -> None:
        """Do nothing: a record is written when its request finishes."""

    def finished(self, replica: int, sequence: ScheduledSequence) -> None:
        """Write the record of a finished request."""
        request, policy = sequence.request, self._policies[replica]
        record = self._recorder.record(sequence, policy, request.id not in self._source.early)
        self._rows[replica].add(record)
        if self._arranger is not None:
            record = ArrangedRecord.of(record, self._arranger.take_order(record.request_id))
        self._on_record(record if len(self._rows) == 1 else RoutedRecord.of(record, replica))
        if request.group_id == self._spec.group:
            self._rounds.append(as_round(sequence, policy, len(self._rounds)))


def modelled(
    policies: Ordered[Policy],
    rules: BatchRules,
    timing: TimingModel,
    jump: bool = True,
    reads: SpanReads | None = None,
) -> list[tuple[Policy, Backend]]:
    """Return an engine with a timing model per policy; `jump` and `reads` as for `ModelledBackend`."""
    return [
        (policy, ModelledBackend(timing, policy.store.state_bytes, jump, policy.rules, reads, rules.speculation))
        for policy in policies
    ]


def simulate(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    timing: TimingModel,
    on_record: Callable[[Record], None],
    *,
    on_step: OnStep = no_note,
    jump: bool = True,
    reads: SpanReads | None = None,
    loads: OverTiers[Any] | None = None,
    **conditions: Any,
) -> RunRow:
    """Serve requests by one engine with a timing model; `conditions` are fields of `RunSpec`."""
    engines = modelled([policy], rules, timing, jump, reads)
    return Run(RunSpec(requests, rules, **conditions), engines, on_record, on_step=on_step, loads=loads).serve()


def serve(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    backend: Backend,
    on_record: Callable[[Record], None],
    *,
    on_step: OnStep = no_note,
    **conditions: Any,
) -> RunRow:
    """Serve requests by one engine; `conditions` are fields of `RunSpec`."""
    return Run(RunSpec(requests, rules, **conditions), [(policy, backend)], on_record, on_step=on_step).serve()
