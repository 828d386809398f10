"""One run: one arm, one seed, one load, from the first arrival to the last token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import simpy

from spanlab.core.policy import Policy
from spanlab.core.request import Request
from spanlab.core.scheduler import BatchRules, Scheduler, Sequence, StepPlan
from spanlab.records import Record, RunRow
from spanlab_sim.backend import ModelledBackend
from spanlab_sim.server import Server
from spanlab_sim.timing import TimingModel

NS = 1e-9
_SAMPLES = 256


@dataclass(slots=True)
class Gauge:
    """What the cache holds over time: exact time-weighted means and peaks, and a thinned sample of the curve."""

    policy: Policy
    _last: int = 0
    _kv_area: int = 0
    _state_area: int = 0
    _kv_peak: int = 0
    _state_peak: int = 0
    _samples: list[tuple[int, int, int]] = field(default_factory=list)
    _every: int = 1
    _count: int = 0

    def advance(self, now: int) -> None:
        """Account for the time since the last call; the contents have not changed in between."""
        if now == self._last:
            return
        content = self.policy.content
        kv, state, elapsed = content.kv_cached, content.state_cached, now - self._last
        self._kv_area += kv * elapsed
        self._state_area += state * elapsed
        self._kv_peak, self._state_peak = max(self._kv_peak, kv), max(self._state_peak, state)
        self._last = now
        self._count += 1
        if self._count % self._every == 0:
            self._samples.append((now, kv, state))
        if len(self._samples) >= 2 * _SAMPLES:
            self._samples, self._every = self._samples[1::2], self._every * 2

    def row(self, seed: int, rate_rps: float | None, server: Server, records: int, preemptions: int) -> RunRow:
        """The finished run as one row."""
        makespan = max(self._last, 1)
        content = self.policy.content
        return RunRow(
            seed=seed,
            rate_rps=rate_rps,
            requests=records,
            makespan_s=self._last * NS,
            busy_s=server.busy_ns * NS,
            steps=server.steps,
            preemptions=preemptions,
            kv_resident_mean_bytes=self._kv_area / makespan,
            state_resident_mean_bytes=self._state_area / makespan,
            kv_resident_peak_bytes=self._kv_peak,
            state_resident_peak_bytes=self._state_peak,
            inserted_bytes=content.inserted_bytes,
            evicted_bytes=content.evicted_bytes,
            timeline_s=[now * NS for now, _, _ in self._samples],
            timeline_kv_bytes=[kv for _, kv, _ in self._samples],
            timeline_state_bytes=[state for _, _, state in self._samples],
        )


def simulate(
    requests: Ordered[Request],
    policy: Policy,
    rules: BatchRules,
    timing: TimingModel,
    on_record: Callable[[Record], None],
    *,
    seed: int = 0,
    rate_rps: float | None = None,
    warmup: int = 0,
    group: int | None = None,
    jump: bool = True,
    on_step: Callable[[StepPlan, int], None] = lambda step, now: None,
) -> RunRow:
    """Serve `requests`, sorted by arrival; the first `warmup` of them are recorded as not counted.

    `group`  the group whose visits and checkpoints are noted one by one in the row.
    """
    scheduler = Scheduler(policy, rules)
    gauge = Gauge(policy)
    env = simpy.Environment()
    order = {request.id: rank for rank, request in enumerate(requests)} if warmup else {}
    rounds: list[dict[str, int | list[int]]] = []
    preemptions = 0

    def finished(sequence: Sequence) -> None:
        nonlocal preemptions
        preemptions += sequence.preemptions
        counted = order.get(sequence.request.id, warmup) >= warmup
        on_record(as_record(sequence, policy, seed, rate_rps, counted))
        if sequence.request.group_id == group:
            rounds.append(_round(sequence, policy, len(rounds)))

    backend = ModelledBackend(timing, policy.content.state_bytes, jump)
    server = Server(env, requests, scheduler, backend, finished, on_step, gauge.advance)
    env.run()
    gauge.advance(int(env.now))
    row = gauge.row(seed, rate_rps, server, len(requests), preemptions)
    row.group_rounds.extend(rounds)
    return row


def as_record(sequence: Sequence, policy: Policy, seed: int, rate_rps: float | None, counted: bool) -> Record:
    """A finished sequence as one flat row."""
    plan = sequence.first_plan
    assert plan is not None, "a finished request was planned"
    loads = policy.rules.needs_states and plan.resume > 0
    state_bytes = policy.content.state_bytes
    losses = plan.losses
    return Record(
        seed=seed,
        rate_rps=rate_rps,
        request_id=sequence.request.id,
        group_id=sequence.request.group_id,
        counted=counted,
        arrived_s=sequence.request.arrived_at * NS,
        admitted_s=sequence.admitted_at * NS,
        first_token_s=sequence.first_token_at * NS,
        finished_s=sequence.finished_at * NS,
        prompt_tokens=plan.prompt,
        output_tokens=sequence.generated,
        seen_tokens=plan.seen,
        matched_tokens=plan.matched,
        resumable_tokens=plan.resumable,
        reused_tokens=plan.resume,
        computed_tokens=plan.prompt - plan.resume,
        lost_never_seen=losses.never_seen,
        lost_never_stored=losses.never_stored,
        lost_kv_evicted=losses.kv_evicted,
        lost_state_evicted=losses.state_evicted,
        lost_state_never_placed=losses.state_never_placed,
        lost_alignment=losses.alignment,
        lost_last_token=losses.last_token,
        lost_locked=losses.locked,
        loaded_state_bytes=state_bytes if loads else 0,
        captured_states=sequence.captured,
        captured_state_bytes=sequence.captured * state_bytes,
        preemptions=sequence.preemptions,
        recomputed_tokens=sequence.recomputed,
    )


def _round(sequence: Sequence, policy: Policy, number: int) -> dict[str, int | list[int]]:
    """One visit of a group: what it found, and the checkpoints that its path holds once it has finished."""
    plan = sequence.first_plan
    assert plan is not None, "a finished request was planned"
    node, _ = policy.roots.find(sequence.request, plan.tokens)
    positions = sorted(state.position for step in node.path() for state in step.states)
    return {
        "round": number,
        "prompt": plan.prompt,
        "match": plan.matched,
        "resume": plan.resume,
        "positions": positions,
    }
