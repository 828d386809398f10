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
    `async_scheduling`        a step is planned while the one before runs, as vLLM does by default since 2026: a request
                              joins one step later, and leaves its seat and memory one step later
    `speculation`             tokens that are drafted ahead of each decode
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    prefill_first: bool = False
    async_scheduling: bool = False
    speculation: Speculation = field(default_factory=Speculation)

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        positive(f"{path}.max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens < self.max_num_seqs:
            least = f"expected at least {path}.max_num_seqs={self.max_num_seqs}"
            raise ValueError(f"{path}.max_num_batched_tokens={self.max_num_batched_tokens}: {least}")
        self.speculation.check(f"{path}.speculation")
        if self.async_scheduling and self.speculation.draft_tokens:
            reason = "a step planned ahead would need the number of accepted tokens, which is not known yet"
            raise ValueError(
                f"{path}.async_scheduling=true: expected false with {path}.speculation.draft_tokens: {reason}"
            )
