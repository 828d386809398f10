"""Slots with one sequence each, as in llama.cpp's server; semantics: commit 0c1e57098 of October
2026.

A slot serves one request at a time and keeps its tokens. A request takes the idle slot whose tokens
begin most like its prompt, else the one that was used least recently. It reuses the common prefix,
and with `cache_reuse` later chunks too: their keys are rotated to new positions, and their values
stay as they were computed, so those answers are not exact. Sequences that would be lost can move to
host memory, which is outside the store's budget; moving them takes no time here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.core.ledger import Ledger
from spanlab.core.plan import DecodeBatch, Match, Need, PrefillRange
from spanlab.core.policies.sequences import (
    SequenceAllocation,
    SequenceMemory,
    SequencePlan,
    WholeSequences,
    make_plan,
    sequence_of,
)
from spanlab.core.request import Request
from spanlab.core.token_string import EMPTY, Tokens, TokenString

#: A slot whose sequence would lose more than half of its tokens is copied to host memory first.
LOSES_MUCH = 0.5
#: A host sequence is not taken for a prompt that would use less than this share of it.
LEAST_USED = 0.25
NEVER = -1


@dataclass(frozen=True, slots=True)
class SlotRules:
    """Rules of the slots, by the names of llama-server's arguments.

    `slots`       sequences in device memory, each of one request at a time (parallel)
    `unified`     slots share all device memory; else each has an equal part of it (kv-unified)
    `similarity`  a slot is chosen by its tokens if they begin with more than this share of the
                  prompt (slot-prompt-similarity); 0: by age alone
    `chunk`       tokens of the smallest chunk that is reused at another position; 0: only prefixes
                  are (cache-reuse)
    `host`        tokens in host memory; 0: none (cache-ram)
    `idle_to_host`  idle slots are copied to host memory when a request starts; unified ones are
                    then cleared
                  (cache-idle-slots)
    """

    slots: int = 4
    unified: bool = True
    similarity: float = 0.1
    chunk: int = 0
    host: int = 0
    idle_to_host: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """Tokens with KV, and the salt that they were computed under."""

    cache_salt: str
    tokens: TokenString

    def common(self, other: Sequence) -> int:
        """Return the length of the longest common prefix."""
        return self.tokens.common(0, other.tokens) if self.cache_salt == other.cache_salt else 0

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING = Sequence("", EMPTY)


@dataclass(slots=True, eq=False)
class Slot:
    """A slot: its sequence, its running request, and the time of the last release."""

    number: int
    sequence: Sequence = NOTHING
    allocation: SequenceAllocation | None = None
    used: int = NEVER

    @property
    def tokens(self) -> int:
        """Tokens of device memory that it takes."""
        return len(self.sequence) if self.allocation is None else self.allocation.tokens


@dataclass(slots=True, eq=False)
class SlotPlan(SequencePlan):
    """A reuse plan on one slot.

    `slot`     the slot; None where all are busy
    `to_host`  its sequence is copied to host memory, and a better one is looked for there
    """

    slot: Slot | None = None
    to_host: bool = False


class HostMemory:
    """Sequences in host memory, in order of their arrival; the first one leaves first."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.sequences: list[Sequence] = []

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum([len(sequence) for sequence in self.sequences])

    def with_copy(self, new: Sequence) -> list[Sequence]:
        """Return the sequences after `new` is copied: it replaces its own prefixes, and is not
        stored twice."""
        if not len(new) or len(new) > self.tokens:
            return self.sequences
        if any(sequence.common(new) == len(new) for sequence in self.sequences):
            return self.sequences
        rest = [sequence for sequence in self.sequences if sequence.common(new) < len(sequence)]
        size = sum([len(sequence) for sequence in rest])
        while size + len(new) > self.tokens:
            size -= len(rest.pop(0))
        return [*rest, new]


def best_of(sequences: list[Sequence], current: Sequence, wanted: Sequence) -> Sequence | None:
    """Return the sequence that a prompt uses most of, and that has more of the prompt than
    `current`; None: no such."""
    common = current.common(wanted)
    used = _share(common, len(current)) if len(current) else -1.0
    share = _share(common, len(wanted))
    best = None
    for sequence in sequences:
        common = sequence.common(wanted)
        uses, has = _share(common, len(sequence)), _share(common, len(wanted))
        if uses >= LEAST_USED and uses > used and has > share:
            best, used, share = sequence, uses, has
    return best


def _share(tokens: float, of: int) -> float:
    """Return a quotient with the precision of the server's, so that equal ones are equal here
    too."""
    return float(np.float32(tokens / of))


def shifted(cached: Tokens, wanted: Tokens, start: int, chunk: int) -> int:
    """Return the end of what is reused when chunks of `cached` behind `start` move to where
    `wanted` needs them.

    Chunks have at least `chunk` tokens, keep their order, and follow each other without a gap.
    """
    source = end = start
    while source < len(cached) and end < len(wanted):
        candidates = source + np.flatnonzero(cached[source:] == wanted[end])
        for source in candidates.tolist():
            most = min(len(cached) - source, len(wanted) - end)
            differ = np.flatnonzero(cached[source : source + most] != wanted[end : end + most])
            length = int(differ[0]) if len(differ) else most
            if length >= chunk:
                source, end = source + length, end + length
                break
        else:
            break
    return end


class SlotPolicy(WholeSequences):
    """Serves each request in one slot of `SlotRules.slots`, whose tokens it reuses."""

    def __init__(
        self, rules: SlotRules, store: SequenceMemory, ledger: Ledger | None = None
    ) -> None:
        super().__init__(store, ledger)
        self.slot_rules = rules
        self.slots = [Slot(number) for number in range(rules.slots)]
        self.host = HostMemory(rules.host)
        self._slot_of: dict[SequenceAllocation, Slot] = {}
        self._releases = 0

    # -- matching ----------------------------------------------------------------------------------

    def match(self, request: Request, now: int, generated: int = 0) -> SlotPlan:
        """Return the reuse in the slot that the request gets; at least one token is computed."""
        prompt, salt = request.num_tokens, request.cache_salt
        length = prompt + generated
        wanted = Sequence(salt, sequence_of(request, length))
        slot, to_host = self._choose(wanted)
        sequence = NOTHING if slot is None else slot.sequence
        if slot is not None and to_host:
            loaded = best_of(self.host.with_copy(sequence), sequence, wanted)
            if loaded is not None:
                sequence = loaded if self._loads(slot, loaded) else NOTHING
        matched = sequence.common(wanted)
        if self.slot_rules.chunk and sequence.cache_salt == wanted.cache_salt:
            matched = shifted(_ids(sequence), _ids(wanted), matched, self.slot_rules.chunk)
        resume = min(matched, length - 1)
        stored = [*(each.sequence for each in self.slots), *self.host.sequences]
        present = max([each.common(wanted) for each in stored], default=0)
        seen = max(self.ledger.lookup(salt, request.string)[0], present, matched)
        usable = min(seen, length - 1)
        reusable = Match(length, seen, usable, usable, matched, resume, resume, resume, 1)
        plan = make_plan(request, generated, reusable, present, self.ledger)
        sizes = plan.seen, plan.matched, plan.resumable, plan.resume
        return SlotPlan(request, prompt, (), plan.repair, *sizes, plan.losses, slot, to_host)

    def _choose(self, wanted: Sequence) -> tuple[Slot | None, bool]:
        """Return the slot that a prompt gets, and whether host memory is used for it."""
        idle = [slot for slot in self.slots if slot.allocation is None]
        chosen, share = None, 0.0
        for slot in idle:
            common = _share(slot.sequence.common(wanted), len(wanted))
            if self.slot_rules.similarity and common > max(
                share, float(np.float32(self.slot_rules.similarity))
            ):
                chosen, share = slot, common
        if chosen is not None:
            common = _share(share * len(wanted), 1)
            return chosen, _share(
                common, len(chosen.sequence)
            ) < LOSES_MUCH and self.host.tokens > 0
        if not idle:
            return None, False
        # among slots that were never used, llama.cpp takes the last one
        return min(reversed(idle), key=lambda slot: slot.used), self.host.tokens > 0

    def _loads(self, slot: Slot, sequence: Sequence) -> bool:
        """Whether a sequence from host memory fits into a slot, beside all others."""
        others = sum([other.tokens for other in self.slots if other is not slot])
        return len(sequence) <= self._share_of_slot and (
            not self.slot_rules.unified or others + len(sequence) <= self.store.tokens
        )

    @property
    def _share_of_slot(self) -> int:
        """The most tokens of one slot."""
        return (
            self.store.tokens if self.slot_rules.unified else self.store.tokens // len(self.slots)
        )

    # -- running -----------------------------------------------------------------------------------

    def allocate(
        self, plan: SlotPlan, now: int, generated: int = 0, drafts: int = 0
    ) -> SequenceAllocation | None:
        """Take the slot and memory for the whole prompt; None, and no change, where all slots or
        tokens are in use."""
        request, length, slot = plan.request, plan.prompt + generated, plan.slot
        busy = sum(
            [other.allocation.tokens for other in self.slots if other.allocation is not None]
        )
        most = self.store.tokens - busy if self.slot_rules.unified else self._share_of_slot
        if slot is None or length + drafts > most:
            return None
        assert slot.allocation is None, "another request has taken the slot since the match"
        if plan.losses.kv_evicted:
            self.ledger.missed(request.cache_salt, request.string, plan.matched, plan.prompt)
        if plan.to_host:
            self._exchange(slot, Sequence(request.cache_salt, sequence_of(request, length)))
        self._set(
            slot, Sequence(request.cache_salt, sequence_of(request, plan.resume)), plan.resume
        )
        allocation = SequenceAllocation(plan, (PrefillRange(0, plan.resume, length),), plan.resume)
        slot.allocation, self._slot_of[allocation] = allocation, slot
        if self.host.tokens and self.slot_rules.idle_to_host:
            for idle in self.slots:
                if idle.allocation is None:
                    self.host.sequences = self.host.with_copy(idle.sequence)
                    if self.slot_rules.unified:
                        self._set(idle, NOTHING, 0)
        granted = self.append(allocation, plan.resume, length, drafts)
        assert granted, "idle slots can always be cleared"
        return allocation

    def _exchange(self, slot: Slot, wanted: Sequence) -> None:
        """Copy a slot's sequence to host memory, and load the one there that suits a prompt better,
        if any."""
        self.host.sequences = self.host.with_copy(slot.sequence)
        loaded = best_of(self.host.sequences, slot.sequence, wanted)
        if loaded is None:
            return
        if not self._loads(slot, loaded):
            self._set(slot, NOTHING, 0)
            return
        self.host.sequences = [
            sequence for sequence in self.host.sequences if sequence is not loaded
        ]
        self._set(slot, loaded, 0)

    def _set(self, slot: Slot, sequence: Sequence, same: int) -> None:
        """Replace the sequence of an idle slot, of whose tokens `same` stay."""
        self.store.evict(len(slot.sequence) - same)
        self.store.insert(len(sequence) - same)
        slot.sequence = sequence

    def make_room(self, allocation: SequenceAllocation, tokens: int) -> bool:
        """Clear idle slots, the first one first; False, without a change, where that is not
        enough."""
        if not self.slot_rules.unified:
            return allocation.tokens + tokens <= self._share_of_slot
        idle = [slot for slot in self.slots if slot.allocation is None and slot.tokens]
        if self.store.free + sum([slot.tokens for slot in idle]) < tokens:
            return False
        for slot in idle:
            if self.store.free < tokens:
                self._set(slot, NOTHING, 0)
        return True

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Return the number of tokens that each allocation can take while no slot is cleared."""
        if self.slot_rules.unified:
            return super().spare_steps(batch)
        most: int = max([allocation.tokens for allocation in batch.allocations()])
        return self._share_of_slot - most

    def insert(
        self, allocation: SequenceAllocation, computed: int, now: int, cache_span: int = 0
    ) -> None:
        """Add the computed tokens to the slot's sequence, which others find when the request has
        ended."""
        request, slot = allocation.plan.request, self._slot_of[allocation]
        added = computed - len(slot.sequence)
        self.store.running -= added
        self.store.insert(added)
        slot.sequence = Sequence(request.cache_salt, sequence_of(request, computed))
        recorded = min(computed, request.num_tokens) if request.output is None else computed
        self.ledger.stored(request.cache_salt, slot.sequence.tokens.cut(0, recorded), recorded)

    def finish(self, allocation: SequenceAllocation, generated: int, now: int) -> None:
        """Add the output to the slot's sequence."""
        self.insert(allocation, allocation.plan.prompt + generated, now)

    def free(self, allocation: SequenceAllocation, now: int) -> None:
        """Give the slot back; its tokens stay."""
        slot = self._slot_of.pop(allocation)
        self.store.running -= allocation.tokens - len(slot.sequence)
        self._releases += 1
        slot.allocation, slot.used, allocation.tokens = None, self._releases, 0

    def need(self, request: Request) -> Need:
        """Return the memory of a store in which one request fits into a slot."""
        need = super().need(request)
        return (
            need
            if self.slot_rules.unified
            else need._replace(kv_bytes=need.kv_bytes * len(self.slots))
        )

    def check(self) -> None:
        """Verify all counts by recounting."""
        store = self.store
        assert store.cached == sum([len(slot.sequence) for slot in self.slots]), (
            "stored tokens are miscounted"
        )
        assert store.cached + store.running == sum([slot.tokens for slot in self.slots]), (
            "as are running ones"
        )
        assert store.kv_cached == store.inserted_bytes - store.evicted_bytes, (
            "bytes came or left uncounted"
        )
        assert store.free >= 0 and self.host.num_tokens <= self.host.tokens, "a limit is exceeded"
        assert all(slot.tokens <= self._share_of_slot for slot in self.slots), (
            "a slot exceeds its memory"
        )
        assert {slot.allocation for slot in self.slots} - {None} == set(self._slot_of), (
            "a request has no slot"
        )
        assert all(len(sequence) for sequence in self.host.sequences), (
            "an empty sequence takes a place"
        )


def _ids(sequence: Sequence) -> Tokens:
    return np.frombuffer(sequence.tokens.tobytes(), np.int32)
