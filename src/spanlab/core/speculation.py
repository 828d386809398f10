"""Speculative decoding: a draft proposes tokens, and one step verifies them all (arXiv 2211.17192)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spanlab.checks import not_negative, one_of, share

_MASK = (1 << 64) - 1


@dataclass
class Speculation:
    """How many tokens are drafted ahead of each decode, how many hold, what drafting costs and what it holds.

    `draft_tokens`  drafted per sequence and step; 0: no speculation
    `acceptance`    probability that a drafted token holds, given that those before it do
    `draft_cost`    time to draft one token for all sequences of a step, as a share of that step without drafts
    `method`        ngram: the drafter holds nothing; eagle: it has keys and values of its own, as EAGLE-3 and MTP
    `draft_layers`  attention layers of the drafter; each holds per token what one of the model's does
    """

    draft_tokens: int = 0
    acceptance: float = 0.7
    draft_cost: float = 0.1
    method: str = "ngram"
    draft_layers: int = 0

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        not_negative(f"{path}.draft_tokens", self.draft_tokens)
        share(f"{path}.acceptance", self.acceptance)
        not_negative(f"{path}.draft_cost", self.draft_cost)
        one_of(f"{path}.method", self.method, ("ngram", "eagle"))
        setting = f"{path}.draft_layers={self.draft_layers}"
        if self.has_kv and self.draft_layers < 1:
            raise ValueError(f"{setting} with {path}.method={self.method}: expected 1 or more, the drafter's layers")
        if self.draft_layers and not self.has_kv:
            raise ValueError(f"{setting} with {path}.method={self.method}: expected 0, for it has no layers")
        if self.has_kv and not self.draft_tokens:
            raise ValueError(f"{path}.method={self.method} with {path}.draft_tokens=0: expected 1 or more drafts")

    @property
    def has_kv(self) -> bool:
        """Whether the drafter has separate keys and values."""
        return self.method == "eagle"

    @property
    def lookahead(self) -> int:
        """Tokens behind those of a step whose keys and values the drafter writes."""
        return self.draft_tokens if self.has_kv else 0

    def accepted(self, request_id: int, generated: int, drafts: int) -> int:
        """Return how many of `drafts` tokens are accepted behind output token `generated` of a request.

        A hash of both numbers decides, so the result is the same for every arm and replica.
        """
        if self.acceptance == 0:
            return 0
        if self.acceptance == 1:
            return drafts
        run = math.log(_uniform(request_id, generated)) / math.log(self.acceptance)
        return min(drafts, int(run))


def _uniform(request_id: int, generated: int) -> float:
    """Return a number in (0, 1] from a hash of two integers: the finalizer of SplitMix64."""
    bits = (request_id * 0x9E3779B97F4A7C15 + generated * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    bits ^= bits >> 31
    return ((bits >> 11) + 1) / (1 << 53)
