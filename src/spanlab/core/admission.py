"""Limits of a batch, speculative drafts, and the prefixes that a store admits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol

from spanlab.core.ledger import Ledger
from spanlab.core.request import Budget, Request
from spanlab.core.token_string import TokenString
from spanlab.core.tree import RootKey
from spanlab.registry import Registry, not_negative, one_of, positive, share
from spanlab.registry import share as check_share

# ------------------------------------------------------------------------------
# Speculative decoding: a draft proposes tokens, and one step verifies them all (arXiv
# 2211.17192).
# ------------------------------------------------------------------------------

_MASK = (1 << 64) - 1


@dataclass
class Speculation:
    """How many tokens are drafted ahead of each decode, how many hold, what drafting costs and what
    it holds.

    `draft_tokens`  drafted per sequence and step; 0: no speculation
    `acceptance`    probability that a drafted token holds, given that those before it do
    `draft_cost`    time to draft one token for all sequences of a step, as a share of that step
                    without drafts
    `method`        ngram: the drafter holds nothing; eagle: it has keys and values of its own, as
                    EAGLE-3 and MTP
    `draft_layers`  attention layers of the drafter; each holds per token what one of the model's
                    does; none is loaded where nothing is drafted
    `modules`       modules of multi-token prediction, of which each drafts one token further ahead
                    than the one before; 1: EAGLE, or one module that drafts all tokens
    """

    draft_tokens: int = 0
    acceptance: float = 0.7
    draft_cost: float = 0.1
    method: str = "ngram"
    draft_layers: int = 0
    modules: int = 1

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        not_negative(f"{path}.draft_tokens", self.draft_tokens)
        share(f"{path}.acceptance", self.acceptance)
        not_negative(f"{path}.draft_cost", self.draft_cost)
        one_of(f"{path}.method", self.method, ("ngram", "eagle"))
        setting = f"{path}.draft_layers={self.draft_layers}"
        if self.method == "eagle" and self.draft_layers < 1:
            raise ValueError(
                f"{setting} with {path}.method={self.method}: expected 1 or more, the drafter's layers"
            )
        if self.draft_layers and self.method != "eagle":
            raise ValueError(
                f"{setting} with {path}.method={self.method}: expected 0, for it has no layers"
            )
        if not 1 <= self.modules <= max(1, self.draft_layers):
            expected = f"1 to {path}.draft_layers={self.draft_layers}, for each has a layer"
            raise ValueError(
                f"{path}.modules={self.modules}: expected {expected if self.draft_layers else 1}"
            )
        if self.draft_tokens > self.modules and self.draft_tokens % self.modules:
            expected = f"up to, or a multiple of, {path}.modules={self.modules}, as in vLLM"
            raise ValueError(f"{path}.draft_tokens={self.draft_tokens}: expected {expected}")

    @property
    def has_kv(self) -> bool:
        """Whether there is a drafter with separate keys and values."""
        return self.method == "eagle" and self.draft_tokens > 0

    @property
    def lookahead(self) -> int:
        """Tokens behind those of a step whose keys and values the drafter writes."""
        return self.draft_tokens if self.has_kv else 0

    @property
    def reach(self) -> int:
        """Tokens behind a position of a prompt on which the drafter's keys and values there depend;
        0 without any."""
        if not self.has_kv:
            return 0
        return self.draft_tokens if min(self.modules, self.draft_tokens) > 1 else 1

    def accepted(self, request_id: int, generated: int, drafts: int) -> int:
        """Return how many of `drafts` tokens are accepted behind output token `generated` of a
        request.

        A hash of both numbers decides, so the result is the same for every arm and replica.
        """
        if self.acceptance == 0:
            return 0
        if self.acceptance == 1:
            return drafts
        # the finalizer of SplitMix64, then a number in (0, 1]
        bits = (
            request_id * 0x9E3779B97F4A7C15 + generated * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019
        ) & _MASK
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
        bits ^= bits >> 31
        uniform = ((bits >> 11) + 1) / (1 << 53)
        return min(drafts, int(math.log(uniform) / math.log(self.acceptance)))


# ------------------------------------------------------------------------------
# Limits of a scheduler step.
# ------------------------------------------------------------------------------


@dataclass
class BatchRules:
    """Continuous batching; `max_num_seqs=1 enable_chunked_prefill=false` is the plain single
    server.

    `max_num_batched_tokens`  most tokens of one step, prefill and decode together
    `max_num_seqs`            most requests that run at once
    `enable_chunked_prefill`  a prompt may be computed in several steps; without it, in one, however
                              long
    `prefill_first`           a step that computes prompts decodes nothing; otherwise decodes come
                              first and chunks fill up
    `long_prefill_token_threshold`  most tokens of one prompt in one step while other requests run
                                    or wait; 0: no limit
    `long_prefill_token_threshold_adaptive`  raises that limit to an equal share of
                                             `max_num_batched_tokens`
    `async_scheduling`        a step is planned while the one before runs, as vLLM does by default
                              since 2026: a request joins one step later, and leaves its seat and
                              memory one step later; with drafts, as if that step accepted all of
                              them
    `speculation`             tokens that are drafted ahead of each decode
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    prefill_first: bool = False
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    async_scheduling: bool = False
    speculation: Speculation = field(default_factory=Speculation)

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        positive(f"{path}.max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens < self.max_num_seqs:
            least = f"expected at least {path}.max_num_seqs={self.max_num_seqs}"
            raise ValueError(
                f"{path}.max_num_batched_tokens={self.max_num_batched_tokens}: {least}"
            )
        key = f"{path}.long_prefill_token_threshold"
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"{key}={self.long_prefill_token_threshold}: expected a number of tokens, or 0"
            )
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            reason = f"{path}.enable_chunked_prefill=false computes a prompt in one step"
            raise ValueError(f"{key}={self.long_prefill_token_threshold}: expected 0, for {reason}")
        if self.long_prefill_token_threshold_adaptive and not self.long_prefill_token_threshold:
            raise ValueError(f"{key}_adaptive=true: expected {key} beside it")
        self.speculation.check(f"{path}.speculation")
        reach, read = self.speculation.reach, "which the modules of the drafter read ahead"
        if self.max_num_batched_tokens < reach:
            tokens = f"{path}.max_num_batched_tokens={self.max_num_batched_tokens}"
            raise ValueError(f"{tokens}: expected at least {reach}, {read}")
        if self.longest_chunk < reach:
            raise ValueError(
                f"{key}={self.long_prefill_token_threshold}: expected at least {reach}, {read}"
            )

    @property
    def longest_chunk(self) -> int:
        """Most tokens of one prompt in one step while other requests run or wait, before it adapts
        to their number."""
        return min(
            self.max_num_batched_tokens,
            self.long_prefill_token_threshold or self.max_num_batched_tokens,
        )

    def most_rows(self, num_requests: int) -> int:
        """Return the most rows of one request in one step, of `num_requests` that run or wait."""
        if not self.long_prefill_token_threshold or num_requests <= 1:
            return self.max_num_batched_tokens
        if not self.long_prefill_token_threshold_adaptive:
            return self.longest_chunk
        return max(self.longest_chunk, self.max_num_batched_tokens // num_requests)


# ------------------------------------------------------------------------------
# Admission: how many of a request's computed tokens are stored.
#
# It decides before space is made, so that refused tokens displace nothing. It does not select
# what is evicted.
# ------------------------------------------------------------------------------


class ComputedPrefix(NamedTuple):
    """A prefix or span whose first `stop` tokens are computed and could be stored.

    `key`      under which it would be stored: equal tokens of different keys are not shared
    `tokens`   all of its tokens, computed or not; once the request has ended, with its output
    `request`  token ids, spans, session; not the length of the output, which no server has
    """

    key: RootKey
    tokens: TokenString
    stop: int
    request: Request


class Admission(Protocol):
    """Decides which tokens are stored; called again as more of a prompt is computed."""

    def admit(self, computed: ComputedPrefix) -> int:
        """Return how many of the first `computed.stop` tokens are stored; tokens stored before
        stay."""
        ...

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Note the tokens that a finished request has computed or read."""
        ...


class Rule:
    """An admission that depends on the computed tokens only."""

    def __init__(self, admit: Callable[[ComputedPrefix], int]) -> None:
        self._admit = admit

    def admit(self, computed: ComputedPrefix) -> int:
        return self._admit(computed)

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record nothing."""


@dataclass(frozen=True)
class AdmissionFacts:
    """Facts of the store that an admission may read: its budget, and the bytes of a token's KV."""

    budget: Budget
    token_bytes: int


#: `facts` are those of the store.
ADMISSIONS: Registry[Admission] = Registry("admission", given=("facts",))


@ADMISSIONS.register("always")
def always() -> Admission:
    """All that is computed is kept."""
    return Rule(lambda computed: computed.stop)


@ADMISSIONS.register("bypass")
class Bypass:
    """Nothing is kept that would take more than a share of the store, or of which too little is
    known.

    Caches of objects of many sizes do so, as AdaptSize (Berger et al., NSDI 2017), whose admission
    probability falls with the size. Here both limits are fixed.
    """

    def __init__(
        self,
        facts: AdmissionFacts,
        share: Annotated[
            float, check_share, "share of the store's bytes that one prefix or span may take"
        ] = 0.1,
        known: Annotated[
            float, check_share, "share of its tokens that an earlier request must have had"
        ] = 0.0,
    ) -> None:
        budget = facts.budget
        self._most = share * min(budget.kv_bytes, budget.total_bytes)
        self._token_bytes, self._known, self._touched = facts.token_bytes, known, Ledger()

    def admit(self, computed: ComputedPrefix) -> int:
        """Admit all computed tokens or none."""
        length = len(computed.tokens)
        if length * self._token_bytes > self._most:
            return 0
        touched = self._touched.lookup(computed.key, computed.tokens)[0] if self._known else 0
        return computed.stop if touched >= self._known * length else 0

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record the tokens, where the rule reads them."""
        if self._known:
            self._touched.computed(key, tokens, len(tokens))


@ADMISSIONS.register("min_length")
def min_length(
    tokens: Annotated[int, positive, "least length of a prefix or span that is kept"] = 256,
) -> Admission:
    """A prefix or span that is shorter than `tokens` is not kept: it saves too little to be worth
    an entry."""
    return Rule(lambda computed: computed.stop if len(computed.tokens) >= tokens else 0)


@ADMISSIONS.register("second_touch")
class SecondTouch:
    """As much is kept as an earlier request that has ended computed or read.

    Tokens that are requested once displace nothing: the doorkeeper of TinyLFU (arXiv 1512.00727),
    for prefixes and spans. The record of touched tokens holds no KV, and is not limited here.
    """

    def __init__(self) -> None:
        self._touched = Ledger()  # not the ledger of causes, which a run may omit

    def admit(self, computed: ComputedPrefix) -> int:
        """Admit the beginning that was touched before."""
        return min(computed.stop, self._touched.lookup(computed.key, computed.tokens)[0])

    def ended(self, key: RootKey, tokens: TokenString) -> None:
        """Record the touched tokens."""
        self._touched.computed(key, tokens, len(tokens))
