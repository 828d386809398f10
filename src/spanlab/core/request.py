"""Requests made of spans: the output of every workload and the input of every policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanlab.core.token_string import IdRun, TokenIds, TokenString, array_of, string_of
from spanlab.core.token_string import Tokens as Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Contiguous tokens that the workload names as one unit: a document, a system prompt, a
    question.

    `ids`          int32 token ids, shape (length,), or a run of ids.
    `independent`  the workload promises that its order among its siblings does not matter (a
                   document, a passage).
    `reusable`     the workload promises that the prompt up to this span's end will be requested
                   again, so its end is a *known boundary*, a position worth a recurrent checkpoint.
    """

    ids: TokenIds
    independent: bool = False
    reusable: bool = False

    @property
    def tokens(self) -> Tokens:
        """The token ids as an array; of a run, made at each call."""
        return array_of(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt, as ordered spans, and the known properties of its output.

    `output_len`  tokens that the answer will have; backends read it, schedulers and policies never
                  do.
    `output`      the answer's token ids, int32, where the workload knows what will be generated; a
                  later prompt can then reuse them. None: ids that no other request has.
    `arrived_at`  integer nanoseconds on the backend's clock; the earliest time where `after` names
                  requests.
    `after`       ids of the requests that must have finished before it arrives.
    `wait_ns`     think or tool time: nanoseconds from the end of the last of them to its arrival.
    `cache_salt`  tenant key: requests with different salts share nothing.
    `priority`    requests with a smaller number are admitted first and preempted last; equal
                  numbers by arrival. Only cases of the entry `schedule` set it.
    `answer`      the gold answer, never part of the prompt.
    `gold`        numbers of the spans that the answer depends on; empty where they are unknown or
                  absent.
    `options`     token ids of wrong answers, int32, that a backend may compare with `output`.
    """

    id: int
    group_id: int
    spans: tuple[Span, ...]
    output_len: int = 1
    arrived_at: int = 0
    cache_salt: str = ""
    answer: str | None = None
    output: Tokens | None = None
    after: tuple[int, ...] = ()
    wait_ns: int = 0
    gold: tuple[int, ...] = ()
    options: tuple[Tokens, ...] = ()
    priority: int = 0

    @property
    def longest_output(self) -> int:
        """Largest number of output tokens that a backend computes behind the prompt."""
        return max(self.output_len, *map(len, self.options)) if self.options else self.output_len

    @property
    def num_tokens(self) -> int:
        """Prompt length in tokens."""
        return sum([len(span.ids) for span in self.spans])

    @property
    def tokens(self) -> Tokens:
        """The prompt's token ids, int32, shape (num_tokens,); concatenated at each call, so keep
        the result."""
        if len(self.spans) == 1:
            return self.spans[0].tokens
        return np.concatenate([span.tokens for span in self.spans])

    @property
    def string(self) -> TokenString:
        """The prompt's token ids as the `TokenString` that the trees compare."""
        return string_of([span.ids for span in self.spans])

    def output_string(self, generated: int) -> TokenString:
        """Return the first `generated` output tokens as a `TokenString`."""
        if self.output is None:
            return string_of([IdRun(-1 - self.id, generated, 0)])
        assert len(self.output) >= generated, (
            "more tokens were generated than the workload's output has"
        )
        return string_of([self.output[:generated]])

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Ends of the reusable spans: increasing prompt positions."""
        ends, position = [], 0
        for span in self.spans:
            position += len(span.ids)
            if span.reusable:
                ends.append(position)
        return tuple(ends)


# ------------------------------------------------------------------------------
# Memory limits of a store.
# ------------------------------------------------------------------------------

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a store, running requests included: bytes of KV, of states, of both together, and
    entries.

    An entry is a stored sequence that no other stored sequence extends, that is, a leaf.
    """

    kv_bytes: int = UNLIMITED
    state_bytes: int = UNLIMITED
    total_bytes: int = UNLIMITED
    entries: int = UNLIMITED

    def times(self, count: int) -> Budget:
        """Return the budget of `count` such stores together."""
        limits = (self.kv_bytes, self.state_bytes, self.total_bytes, self.entries)
        return Budget(*(limit if limit >= UNLIMITED else count * limit for limit in limits))


# ------------------------------------------------------------------------------
# Time and request of a store's current operation, for eviction orders that depend on time or on
# requests.
# ------------------------------------------------------------------------------


class Moment:
    """The time of the last operation of a store, in nanoseconds on the clock of the run, and its
    request."""

    def __init__(self) -> None:
        self.now = 0
        self.request: Request | None = None
