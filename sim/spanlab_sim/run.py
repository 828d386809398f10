"""One run: one arm, one seed, one load, from the first arrival to the last token; and its modelled
backend."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.rt import RealtimeEnvironment

from spanlab.core.admission import BatchRules, Speculation
from spanlab.core.ahead import make_scheduler
from spanlab.core.policies.tiered import OverTiers
from spanlab.core.protocol import Arranger, PassageRules, Policy
from spanlab.core.request import Request
from spanlab.core.rules import ReuseRules
from spanlab.core.step import (
    PREFIXES,
    Backend,
    ScheduledSequence,
    ScheduledStep,
    SpanReads,
    StepFeatures,
    StepResult,
    features,
    finished_after,
    finished_prompts,
)
from spanlab.metrics import CacheUsage, Recorder, as_round
from spanlab.records import NS, ArrangedRecord, Record, ReplicaRow, RoutedRecord, RunRow
from spanlab_sim.routing import Route
from spanlab_sim.server import OnStep, Replica, Server, Source, no_note, route_to_first
from spanlab_sim.timing import Nanoseconds, TimingModel

# ------------------------------------------------------------------------------
# Offered work of a run, in seconds of fully batched steps: the numerator of its utilisation.
# ------------------------------------------------------------------------------

# What prefills add to a step; decodes are counted from the records, as those of equal steps pass
# at once. A step has its forwards and its runs of recurrent layers whatever is in it.
_ADDED = (
    "prefill_tokens",
    "prefill_pairs",
    "num_first_tokens",
    "loaded_state_bytes",
    "captured_state_bytes",
    "prefill_context",
    "shallow_token_layers",
    "shallow_pair_layers",
    "copied_tokens",
    "span_reads",
    "turned_keys",
    "scan_chunks",
    "composed_maps",
    "map_tokens",
    "added_flops",
    "added_bytes",
)
_PER_STEP = ("num_forwards", "scan_runs")


@dataclass
class DemandMeter:
    """A timing model that adds up the work of the steps that it times.

    Utilisation is demand ÷ the time in which the requests arrive. Unlike busy time, it does not
    count small steps while few requests decode: a server that is always busy with small steps has
    spare capacity.
    """

    timing: TimingModel
    _work: tuple[int, ...] = tuple(StepFeatures())  # sums over the steps that compute prompts
    _prefill_steps: int = 0
    _requests: int = 0
    _decodes: int = 0
    _decode_context: int = 0

    def step(self, features: StepFeatures) -> int:
        """Return the nanoseconds of one step."""
        if features.num_prefills:
            self._work = tuple(map(add, self._work, features))
            self._prefill_steps += 1
        return self.timing.step(features)

    def span(self, features: StepFeatures, k: int) -> Nanoseconds:
        """Return the durations of k decode steps."""
        return self.timing.span(features, k)

    def finished(self, record: Record) -> None:
        """Count a finished request's decodes: all tokens of its output but the first."""
        decodes = record.output_tokens - 1
        self._requests += 1
        self._decodes += decodes
        self._decode_context += decodes * record.prompt_tokens + decodes * (decodes + 1) // 2

    def demand_s(self, rules: BatchRules) -> float | None:
        """Return the seconds of the work in the fewest steps that the batch limits allow, all
        equal.

        As many steps as prompt tokens computed and decodes fill with `max_num_batched_tokens` each,
        or prefills and decodes with `max_num_seqs` each, whichever is more. None with speculation,
        where the number of accepted drafts determines the number of steps.
        """
        if rules.speculation.draft_tokens:
            return None
        tokens = (
            StepFeatures(*self._work).prefill_tokens + self._decodes
        ) / rules.max_num_batched_tokens
        steps = max(tokens, (self._requests + self._decodes) / rules.max_num_seqs)
        if not steps:
            return 0.0
        work, prefills = StepFeatures(*self._work)._asdict(), max(1, self._prefill_steps)
        average = StepFeatures(
            **{name: round(work[name] / steps) for name in _ADDED},
            **{name: round(work[name] / prefills) for name in _PER_STEP},
            num_prefills=round(self._requests / steps),
            num_decodes=round(self._decodes / steps),
            decode_context=round(self._decode_context / steps),
        )
        return steps * self.timing.step(average) * 1e-9


# ------------------------------------------------------------------------------
# Speculative decoding on a modelled backend: the cost of drafting, and the accepted drafts.
# ------------------------------------------------------------------------------


def with_drafts(
    result: StepResult, step: ScheduledStep, speculation: Speculation, timing: TimingModel
) -> StepResult:
    """Return the result of a step that drafts first; a sequence ends its step after the first
    rejected draft.

    One that had ended before takes part for nothing. Positions are drafted one after another, each
    for all sequences at once, in `draft_cost` of the time that they would decode in without drafts.
    """
    accepted, finished = [], finished_prompts(step)
    for sequence, drafts in zip(step.decodes, step.drafts, strict=True):
        if sequence.has_ended:
            accepted.append(0)
            continue
        remaining = sequence.request.output_len - sequence.generated - 1
        num_accepted = speculation.accepted(sequence.request.id, sequence.generated, drafts)
        accepted.append(min(num_accepted, remaining))
        if num_accepted >= remaining:
            finished.append(sequence)
    context = sum([sequence.prompt + sequence.generated for sequence in step.decodes])
    plain = StepFeatures(num_decodes=len(step.decodes), decode_context=context, num_forwards=1)
    drafting_ns = int(speculation.draft_cost * max(step.drafts) * timing.step(plain))
    return replace(
        result, duration_ns=result.duration_ns + drafting_ns, finished=finished, accepted=accepted
    )


class ModelledBackend:
    """Runs steps by a timing model. With `jump`, equal decode steps pass as one.

    `rules` are the policy's; `reads` is the cost of reading reused spans, None where the policy
    reuses prefixes only.
    `speculation`  acceptance and cost of the drafts in steps that verify any.
    """

    def __init__(
        self,
        timing: TimingModel,
        state_bytes: int,
        jump: bool = True,
        rules: ReuseRules = PREFIXES,
        reads: SpanReads | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._timing, self._state_bytes, self._jump = timing, state_bytes, jump
        self._rules, self._reads, self._speculation = rules, reads, speculation or Speculation()
        self._decodes: list[ScheduledSequence] = []
        self._remaining = 0  # steps until the first of them finishes

    def resume(self) -> None:
        """Do nothing: the duration of a modelled step does not depend on when it begins."""

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Return the duration of a step, and how often it repeats.

        It repeats until a sequence finishes, memory runs short or a request arrives.
        """
        counts = features(step, self._state_bytes, self._rules, self._reads)
        if step.decodes is not self._decodes:
            before, self._decodes = self._decodes, step.decodes
            # those that have only been joined by others need no second look
            is_joined = self._remaining > 0 and step.decodes[: len(before)] == before
            known = len(before) if is_joined else 0
            lengths = [
                s.request.output_len - s.generated for s in step.decodes[known:] if not s.has_ended
            ]
            self._remaining = min([*lengths, self._remaining] if known else lengths, default=1)
        remaining = self._remaining
        times = 1 if step.chunks or not self._jump else min(remaining, step.max_repeats)
        if times == 1:
            duration_ns, ends = self._timing.step(counts), None
        else:
            ends = self._ends(counts, times, deadline_ns)
            times, duration_ns = len(ends), int(ends[-1])
        self._remaining -= times
        finished = finished_after(step, times) if remaining == times else finished_prompts(step)
        result = StepResult(duration_ns, finished, times, ends=() if ends is None else ends)
        return with_drafts(result, step, self._speculation, self._timing) if step.drafts else result

    def _ends(self, counts: StepFeatures, most: int, deadline_ns: int | None) -> NDArray[np.int64]:
        """Return the ends of the equal decode steps, up to `most`, that pass until the deadline."""
        ends: NDArray[np.int64] = self._timing.span(counts, most).cumsum()
        times = (
            most
            if deadline_ns is None
            else min(most, 1 + int(ends.searchsorted(deadline_ns, side="right")))
        )
        return ends[:times]

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: this backend stores no KV."""

    def close(self) -> None:
        """Do nothing: this backend holds no memory."""


# ------------------------------------------------------------------------------
# One run of one arm.
# ------------------------------------------------------------------------------

#: Environments by clock. Virtual time passes as steps report it and skips idle time; wall time
#: waits for arrivals.
CLOCKS: dict[str, Callable[[], simpy.Environment]] = {
    "virtual": simpy.Environment,
    "wall": lambda: RealtimeEnvironment(factor=1e-9, strict=False),
}
MakeRoute = Callable[[Ordered[Replica]], Route]


@dataclass(frozen=True)
class RunSpec:
    """One run of one arm: its requests, sorted by arrival, the rules of its batches, and its
    conditions.

    `warmup`    the first requests to arrive, which are not counted
    `group`     the group whose visits and checkpoints are noted one by one in the row
    `clients`   most requests in flight, as for `Source`
    `clock`     a key of `CLOCKS`
    `passages`  selects and orders passages, for one engine alone; records then have the order.
                None: as given
    `seen`      the longest seen prefix of each request by id, for passages as given; None: found in
                the run
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
        """`route` makes the router of the replicas; `loads` is the policy over lower tiers, for one
        engine alone."""
        assert spec.passages is None or len(engines) == 1, (
            "replicas would serve passages in different orders"
        )
        self._spec, self._on_record, self._on_step = spec, on_record, on_step
        self._policies = [policy for policy, _ in engines]
        self._env = CLOCKS[spec.clock]()
        self._source = Source(spec.requests, spec.clients, spec.warmup)
        self._usage = CacheUsage([policy.store for policy in self._policies])
        self._recorder = Recorder(
            spec.seed, spec.rate_rps, spec.seen if spec.passages is None else None
        )
        self._rounds: list[dict[str, int | list[int]]] = []
        self._rows = [ReplicaRow() for _ in engines]
        self._arranger = (
            None if spec.passages is None else Arranger(spec.passages, self._policies[0])
        )
        self._replicas = [
            Replica(
                self._env,
                make_scheduler(policy, spec.rules),
                backend,
                self,
                number=number,
                loads=loads,
            )
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
        busy_ns = sum([replica.busy_ns for replica in replicas])
        steps = sum([replica.steps for replica in replicas])
        row = self._usage.row(
            spec.seed, spec.rate_rps, len(spec.requests), preemptions, busy_ns, steps
        )
        row.group_rounds.extend(self._rounds)
        if len(self._rows) > 1:
            row.replicas.extend(self._rows)
        return row

    # -- what the replicas tell --------------------------------------------------------------------

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
    """Return an engine with a timing model per policy; `jump` and `reads` as for
    `ModelledBackend`."""
    return [
        (
            policy,
            ModelledBackend(
                timing, policy.store.state_bytes, jump, policy.rules, reads, rules.speculation
            ),
        )
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
    return Run(
        RunSpec(requests, rules, **conditions), engines, on_record, on_step=on_step, loads=loads
    ).serve()


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
    return Run(
        RunSpec(requests, rules, **conditions), [(policy, backend)], on_record, on_step=on_step
    ).serve()
