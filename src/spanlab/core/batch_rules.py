"""Limits of a scheduler step."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import positive
from spanlab.core.speculation import Speculation


@dataclass
class BatchRules:
    """Continuous batching; `max_num_seqs=1 enable_chunked_prefill=false` is the plain single server.

    `max_num_batched_tokens`  most tokens of one step, prefill and decode together
    `max_num_seqs`            most requests that run at once
    `enable_chunked_prefill`  a prompt may be computed in several steps; without it, in one, however long
    `prefill_first`           a step that computes prompts decodes nothing; otherwise decodes come first and chunks fill
                              up
    `long_prefill_token_threshold`  most tokens of one prompt in one step while other requests run or wait; 0: no limit
    `long_prefill_token_threshold_adaptive`  raises that limit to an equal share of `max_num_batched_tokens`
    `async_scheduling`        a step is planned while the one before runs, as vLLM does by default since 2026: a request
                              joins one step later, and leaves its seat and memory one step later
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
            raise ValueError(f"{path}.max_num_batched_tokens={self.max_num_batched_tokens}: {least}")
        self._check_threshold(path)
        self.speculation.check(f"{path}.speculation")
        if self.async_scheduling and self.speculation.draft_tokens:
            reason = "a step planned ahead would need the number of accepted tokens, which is not known yet"
            raise ValueError(
                f"{path}.async_scheduling=true: expected false with {path}.speculation.draft_tokens: {reason}"
            )

    def _check_threshold(self, path: str) -> None:
        key = f"{path}.long_prefill_token_threshold"
        if self.long_prefill_token_threshold < 0:
            raise ValueError(f"{key}={self.long_prefill_token_threshold}: expected a number of tokens, or 0")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            reason = f"{path}.enable_chunked_prefill=false computes a prompt in one step"
            raise ValueError(f"{key}={self.long_prefill_token_threshold}: expected 0, for {reason}")
        if self.long_prefill_token_threshold_adaptive and not self.long_prefill_token_threshold:
            raise ValueError(f"{key}_adaptive=true: expected {key} beside it")

    @property
    def longest_chunk(self) -> int:
        """Most tokens of one prompt in one step while other requests run or wait, before it adapts to their number."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)

    def most_rows(self, num_requests: int) -> int:
        """Return the most rows of one request in one step, of `num_requests` that run or wait."""
        if not self.long_prefill_token_threshold or num_requests <= 1:
            return self.max_num_batched_tokens
        if not self.long_prefill_token_threshold_adaptive:
            return self.longest_chunk
        return max(self.longest_chunk, self.max_num_batched_tokens // num_requests)
