"""Caches of whole sequences: a request copies the longest beginning of a stored one; semantics:
mistral.rs 0.9.

mistral.rs without paged attention stores each finished request as one sequence, prompt and output.
A later prompt takes the stored sequence with the longest common prefix, which need not be a prefix
of the prompt. Two rules are unusual. A prompt that a stored sequence contains whole reuses nothing,
as no token would be left to compute. A sequence that was computed twice keeps its age.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.core.ledger import Ledger
from spanlab.core.plan import (
    DecodeBatch,
    Losses,
    Match,
    Need,
    PrefillRange,
    ReusePlan,
    Work,
    losses_of,
)
from spanlab.core.protocol import BeforeChange, unnoticed
from spanlab.core.repair import Repair
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.rules import ReuseRules
from spanlab.core.token_string import TokenString

#: Losses of a request that was preempted: its first plan has them.
NOTHING_LOST = Losses(0, 0, 0, 0, 0, 0, 0, 0)


class SequenceMemory:
    """Tokens of KV under one limit: `cached` ones of stored sequences, and others that `running`
    requests occupy."""

    state_bytes = 0

    def __init__(self, tokens: int, token_bytes: int) -> None:
        self.tokens, self.token_bytes = tokens, token_bytes
        self.cached = self.running = 0
        self._inserted = self._evicted = 0

    @property
    def free(self) -> int:
        """Tokens that neither stored sequences nor running requests occupy."""
        return self.tokens - self.cached - self.running

    @property
    def kv_cached(self) -> int:
        """Bytes of stored sequences."""
        return self.cached * self.token_bytes

    @property
    def state_cached(self) -> int:
        """Zero: no state is ever stored."""
        return 0

    @property
    def inserted_bytes(self) -> int:
        """Bytes that were ever stored."""
        return self._inserted * self.token_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes that were stored and have left."""
        return self._evicted * self.token_bytes

    def insert(self, tokens: int) -> None:
        """Count tokens that are stored."""
        self.cached += tokens
        self._inserted += tokens

    def evict(self, tokens: int) -> None:
        """Count stored tokens that leave."""
        self.cached -= tokens
        self._evicted += tokens


@dataclass(slots=True, eq=False)
class SequencePlan(ReusePlan):
    """A reuse plan over whole sequences."""

    def without_reuse(self) -> SequencePlan:
        """Return the plan itself: what it reuses never reduces the memory that is available to
        it."""
        return self


@dataclass(slots=True, eq=False)
class SequenceAllocation:
    """The memory of a running request: `tokens` that it may write."""

    plan: ReusePlan
    work: tuple[Work, ...]
    tokens: int
    captures: list[int] = field(default_factory=list)
    captured: int = 0
    captured_maps: int = 0
    loading: bool = False

    @property
    def loads_state(self) -> bool:
        """False: no state is ever stored."""
        return False


def sequence_of(request: Request, length: int) -> TokenString:
    """Return the first `length` tokens of prompt and output."""
    prompt = request.string
    generated = length - len(prompt)
    return prompt + request.output_string(generated) if generated > 0 else prompt.cut(0, length)


def make_plan(
    request: Request, generated: int, match: Match, present: int, ledger: Ledger
) -> SequencePlan:
    """Return the plan of a request with one cache span.

    `match`    its `matched` is the end of what this request could read
    `present`  tokens that are stored anywhere
    """
    tokens, prompt = request.string, request.num_tokens
    lost, stored = NOTHING_LOST, max(present, match.matched)
    if not generated:
        evicted = ledger.evicted(request.cache_salt, tokens, stored, match.usable)
        readable = match._replace(matched=min(match.matched, match.aligned))
        lost = losses_of(
            readable, evicted, stranded=max(0, min(stored, match.aligned) - match.present)
        )
    sizes = match.seen, stored, match.matched, match.resume
    return SequencePlan(request, prompt, (), Repair(), *sizes, lost)


class WholeSequences:
    """What caches of whole sequences have in common: memory is token by token, and chunks end
    anywhere."""

    stores_when_scheduled = False

    def __init__(self, store: SequenceMemory, ledger: Ledger | None = None) -> None:
        self.store, self.rules = store, ReuseRules()
        self.ledger = Ledger() if ledger is None else ledger

    def start_step(self, now: int) -> None:
        """Do nothing: nothing changes between steps."""

    def make_room(self, allocation: SequenceAllocation, tokens: int) -> bool:
        """Evict for `tokens` more tokens of a request; False, without a change, where they cannot
        fit."""
        raise NotImplementedError  # every cache has its own

    def chunk_end(self, plan: ReusePlan, start: int, stop: int, most: int, generated: int) -> int:
        """Return `stop`: a chunk may end anywhere."""
        return stop

    def append(
        self, allocation: SequenceAllocation, start: int, stop: int, drafts: int = 0
    ) -> bool:
        """Take memory for tokens `[start, stop)` and for drafts; False where memory is short."""
        more = stop + drafts - allocation.tokens
        if more > 0:
            if not self.make_room(allocation, more):
                return False
            allocation.tokens += more
            self.store.running += more
        return True

    def repeat(self, batch: DecodeBatch, times: int, before: BeforeChange = unnoticed) -> None:
        """Extend each allocation by `times` tokens, for which there is free memory: nothing
        leaves."""
        for allocation, start in zip(batch.allocations(), batch.starts(), strict=True):
            granted = self.append(allocation, start, start + times)
            assert granted, "more steps were scheduled than memory allows"

    def spare_steps(self, batch: DecodeBatch) -> int:
        """Return the number of tokens that each allocation can take while nothing is evicted."""
        return self.store.free // len(batch.sequences)

    def futile_steps(self, request: Request, batch: DecodeBatch) -> int:
        """Return `UNLIMITED`: decoding only takes memory."""
        return UNLIMITED

    def need(self, request: Request) -> Need:
        """Return the memory of one request by itself."""
        tokens = request.num_tokens + request.output_len - 1
        return Need(tokens, 0, 1, tokens * self.store.token_bytes, 0)

    def checkpoints(self, request: Request) -> list[int]:
        """Return an empty list: no states are stored."""
        return []


class SequencePolicy(WholeSequences):
    """Stores each finished request as one sequence, at most `entries` of them, and evicts the one
    stored first.

    A running request has its own copy of all that it reuses. Where the budget is short, stored
    sequences leave in the same order.
    """

    def __init__(self, store: SequenceMemory, entries: int, ledger: Ledger | None = None) -> None:
        super().__init__(store, ledger)
        self.entries = entries
        #: By salt and all tokens, the number of tokens with KV: the last output token has none. In
        #: order of eviction.
        self.stored: dict[tuple[str, TokenString], int] = {}
        self._allocations: set[SequenceAllocation] = set()

    def match(self, request: Request, now: int, generated: int = 0) -> SequencePlan:
        """Return the reuse of the longest common prefix; none where the whole prompt is stored."""
        prompt = request.num_tokens
        length = prompt + generated
        tokens, salt = sequence_of(request, length), request.cache_salt
        candidates = [
            (of, covered) for (of_salt, of), covered in self.stored.items() if of_salt == salt
        ]
        matched = max([min(covered, tokens.common(0, of)) for of, covered in candidates], default=0)
        whole = matched == length
        seen = max(self.ledger.lookup(salt, request.string)[0], matched)
        usable = min(seen, length - 1)
        resume = 0 if whole else matched
        ends = matched, resume, resume, resume
        reusable = Match(length, seen, usable, 0 if whole else usable, *ends, 1)
        return make_plan(request, generated, reusable, matched, self.ledger)

    def allocate(
        self, plan: SequencePlan, now: int, generated: int = 0, drafts: int = 0
    ) -> SequenceAllocation | None:
        """Copy the reused tokens and take memory for the whole prompt; None, and no change, where
        it does not fit."""
        request, length = plan.request, plan.prompt + generated
        allocation = SequenceAllocation(plan, (PrefillRange(0, plan.resume, length),), 0)
        if not self.append(allocation, plan.resume, length, drafts):
            return None
        if plan.losses.kv_evicted:
            self.ledger.missed(request.cache_salt, request.string, plan.matched, plan.prompt)
        self._allocations.add(allocation)
        return allocation

    def make_room(self, allocation: SequenceAllocation, tokens: int) -> bool:
        """Evict the sequences stored first; False, without a change, where running requests take
        the memory."""
        if self.store.running + tokens > self.store.tokens:
            return False
        while self.store.free < tokens:
            self._evict_first()
        return True

    def _evict_first(self) -> None:
        first = next(iter(self.stored))
        self.store.evict(self.stored.pop(first))

    def insert(
        self, allocation: SequenceAllocation, computed: int, now: int, cache_span: int = 0
    ) -> None:
        """Record the computed tokens, which others find when the request has finished."""
        request = allocation.plan.request
        self.ledger.computed(request.cache_salt, sequence_of(request, computed), computed)

    def finish(self, allocation: SequenceAllocation, generated: int, now: int) -> None:
        """Store the request, unless the same tokens are stored, and evict the first ones beyond the
        limit."""
        request, prompt = allocation.plan.request, allocation.plan.prompt
        length = prompt + generated
        recorded = prompt if request.output is None else length
        self.ledger.stored(request.cache_salt, sequence_of(request, recorded), recorded)
        last = 1  # the last output token tells sequences apart, and has no KV
        key = request.cache_salt, sequence_of(request, length + last)
        if key not in self.stored:
            allocation.tokens -= length
            self.store.running -= length
            self.store.insert(length)
            self.stored[key] = length
        while len(self.stored) > self.entries:
            self._evict_first()

    def free(self, allocation: SequenceAllocation, now: int) -> None:
        """Free the memory of a request that is not stored."""
        self._allocations.remove(allocation)
        self.store.running -= allocation.tokens
        allocation.tokens = 0

    def check(self) -> None:
        """Verify all counts by recounting."""
        store = self.store
        assert store.cached == sum(self.stored.values()), "stored tokens are miscounted"
        assert store.running == sum([allocation.tokens for allocation in self._allocations]), (
            "as are running ones"
        )
        assert store.kv_cached == store.inserted_bytes - store.evicted_bytes, (
            "bytes came or left uncounted"
        )
        assert store.free >= 0 and len(self.stored) <= self.entries, "a limit is exceeded"
        assert all(covered == len(tokens) - 1 for (_, tokens), covered in self.stored.items())
