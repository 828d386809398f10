"""Records and the run row from a scheduler's sequences; equal for every backend."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from spanlab.core.protocol import Policy, StoredBytes
from spanlab.core.request import Request
from spanlab.core.step import ScheduledSequence
from spanlab.core.token_string import string_of
from spanlab.core.tree import Node, PrefixTree, take_apart
from spanlab.records import NS, Record, RunRow

_SAMPLES = 256


@dataclass(slots=True)
class CacheUsage:
    """Resident bytes of all caches over time: exact time-weighted means, peaks, and a thinned
    sample of the curve."""

    stores: Ordered[StoredBytes]
    _last: int = 0
    _kv_area: int = 0
    _state_area: int = 0
    _kv_peak: int = 0
    _state_peak: int = 0
    _samples: list[tuple[int, int, int]] = field(default_factory=list)
    _every: int = 1
    _count: int = 0
    # of several stores: contents until a time
    _ahead: list[deque[tuple[int, int, int]]] = field(default_factory=list)

    def advance(self, number: int, now: int) -> None:
        """Account for the time of one store since its last call; its contents have not changed in
        between.

        A store may be ahead of the others, where equal steps pass as one.
        """
        store = self.stores[number]
        if len(self.stores) == 1:
            if now != self._last:  # reading a store takes longer than the rest
                self._add(now, store.kv_cached, store.state_cached)
            return
        if not self._ahead:
            self._ahead = [deque() for _ in self.stores]
        self._ahead[number].append((now, store.kv_cached, store.state_cached))
        while all(self._ahead):
            until = min([contents[0][0] for contents in self._ahead])
            self._add(
                until,
                *(sum([contents[0][column] for contents in self._ahead]) for column in (1, 2)),
            )
            for contents in self._ahead:
                if contents[0][0] == until:
                    contents.popleft()

    def _add(self, now: int, kv: int, state: int) -> None:
        """Account for the time since the last call, in which all stores held these bytes."""
        if now == self._last:
            return
        elapsed = now - self._last
        self._kv_area += kv * elapsed
        self._state_area += state * elapsed
        if kv > self._kv_peak:
            self._kv_peak = kv
        if state > self._state_peak:
            self._state_peak = state
        self._last = now
        self._count += 1
        if self._count % self._every == 0:
            self._samples.append((now, kv, state))
            if len(self._samples) >= 2 * _SAMPLES:
                self._samples, self._every = self._samples[1::2], self._every * 2

    def row(
        self,
        seed: int,
        rate_rps: float | None,
        requests: int,
        preemptions: int,
        busy_ns: int,
        steps: int,
    ) -> RunRow:
        """The finished run as one row."""
        makespan = max(self._last, 1)
        return RunRow(
            seed=seed,
            rate_rps=rate_rps,
            requests=requests,
            makespan_s=self._last * NS,
            busy_s=busy_ns * NS,
            steps=steps,
            preemptions=preemptions,
            kv_resident_mean_bytes=self._kv_area / makespan,
            state_resident_mean_bytes=self._state_area / makespan,
            kv_resident_peak_bytes=self._kv_peak,
            state_resident_peak_bytes=self._state_peak,
            inserted_bytes=sum([store.inserted_bytes for store in self.stores]),
            evicted_bytes=sum([store.evicted_bytes for store in self.stores]),
            timeline_s=[now * NS for now, _, _ in self._samples],
            timeline_kv_bytes=[kv for _, kv, _ in self._samples],
            timeline_state_bytes=[state for _, _, state in self._samples],
        )


@dataclass(slots=True)
class SeenPrefixes:
    """Finds the longest prefix that each request shares with those before it, in order of
    arrival."""

    _arrived: PrefixTree = field(default_factory=PrefixTree)
    _roots: dict[str, Node] = field(default_factory=dict)

    def arrived(self, request: Request) -> int:
        """Return the length of a request's longest seen prefix; later ones may share its known
        answer too."""
        salt, tree, tokens = request.cache_salt, self._arrived, request.string
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = tree.new_root()
        node, seen = tree.match(root, tokens)
        if request.output is not None:
            tokens += string_of([request.output[: request.output_len]])
        if node.depth > seen:
            assert node.parent is not None, "the root ends at zero"
            node = node.parent
        tree.extend(node, tokens, len(tokens), 0)
        return seen

    def take_apart(self) -> None:
        """Forget all requests."""
        for root in self._roots.values():
            take_apart(root)


def seen_tokens(requests: Ordered[Request]) -> dict[int, int]:
    """Return the longest seen prefix of each request by its id, where they arrive in this order in
    every run."""
    prefixes = SeenPrefixes()
    seen = {request.id: prefixes.arrived(request) for request in requests}
    prefixes.take_apart()
    return seen


@dataclass(slots=True)
class Recorder:
    """Makes the records of one run; it is told of every request, of all replicas, in order of
    arrival.

    `seen`  the longest seen prefix of every request, where the order of arrival does not depend on
            the run; None: found as requests arrive
    """

    seed: int = 0
    rate_rps: float | None = None
    seen: Mapping[int, int] | None = None
    _prefixes: SeenPrefixes = field(default_factory=SeenPrefixes)
    # by id of a request without a record yet
    _unrecorded: dict[int, int] = field(default_factory=dict)

    def arrived(self, request: Request) -> None:
        """Note the arrival of a request, as it is served."""
        if self.seen is None:
            self._unrecorded[request.id] = self._prefixes.arrived(request)

    def record(self, sequence: ScheduledSequence, policy: Policy, counted: bool) -> Record:
        """Return the record of a finished sequence."""
        plan = sequence.first_plan
        assert plan is not None, "a finished request was planned"
        rules, state_bytes = policy.rules, policy.store.state_bytes
        loads = rules.needs_states and plan.resume > 0
        loaded = (
            state_bytes * loads
            if rules.maps is None
            else sum([state.num_bytes for state in plan.states])
        )
        maps = sequence.captured_maps
        number, losses = sequence.request.id, plan.losses
        seen = self._unrecorded.pop(number) if self.seen is None else self.seen[number]
        unseen = min(losses.never_seen, plan.prompt - seen)
        return Record(
            seed=self.seed,
            rate_rps=self.rate_rps,
            request_id=sequence.request.id,
            group_id=sequence.request.group_id,
            counted=counted,
            arrived_s=sequence.request.arrived_at * NS,
            admitted_s=sequence.admitted_at * NS,
            first_token_s=sequence.first_token_at * NS,
            finished_s=sequence.finished_at * NS,
            prompt_tokens=plan.prompt,
            output_tokens=sequence.generated,
            seen_tokens=seen,
            matched_tokens=plan.matched,
            resumable_tokens=plan.resumable,
            reused_tokens=plan.reused,
            computed_tokens=plan.prompt - plan.reused,
            repaired_tokens=plan.repaired,
            copied_tokens=sum([work.copied for work in sequence.first_work]),
            lost_never_seen=unseen,
            lost_out_of_reach=losses.never_seen - unseen,
            lost_never_stored=losses.never_stored,
            lost_kv_evicted=losses.kv_evicted,
            lost_state_evicted=losses.state_evicted,
            lost_state_never_placed=losses.state_never_placed,
            lost_alignment=losses.alignment,
            lost_last_token=losses.last_token,
            lost_locked=losses.locked,
            lost_repair=losses.repair,
            loaded_state_bytes=loaded,
            captured_states=sequence.captured,
            captured_state_bytes=(sequence.captured - maps) * state_bytes + maps * rules.map_bytes,
            preemptions=sequence.preemptions,
            recomputed_tokens=sequence.recomputed,
        )


def as_round(
    sequence: ScheduledSequence, policy: Policy, number: int
) -> dict[str, int | list[int]]:
    """One request of a group: its match, and the checkpoints on its path after it finished."""
    plan = sequence.first_plan
    assert plan is not None, "a finished request was planned"
    return {
        "round": number,
        "prompt": plan.prompt,
        "match": plan.matched,
        "resume": plan.resume,
        "positions": policy.checkpoints(sequence.request),
    }
