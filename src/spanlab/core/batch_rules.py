"""How steps are filled."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import positive


@dataclass
class BatchRules:
    """Continuous batching; `max_num_seqs=1 enable_chunked_prefill=false` is the plain single server.

    `max_num_batched_tokens`  most tokens of one step, prefill and decode together
    `max_num_seqs`            most requests that run at once
    `enable_chunked_prefill`  a prompt may be computed in several steps; without it, in one, however long
    `prefill_first`           a step that computes prompts decodes nothing; otherwise decodes come first and chunks fill
                              up
    `async_scheduling`        a step is planned while the one before runs, so that a request joins one step later (vLLM)
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 64
    enable_chunked_prefill: bool = True
    prefill_first: bool = False
    async_scheduling: bool = False

    def check(self, path: str) -> None:
        """Refuse what makes no sense; `path` is the key of these settings."""
        positive(f"{path}.max_num_seqs", self.max_num_seqs)
        if self.max_num_batched_tokens < self.max_num_seqs:
            least = f"expected at least {path}.max_num_seqs={self.max_num_seqs}"
            raise ValueError(f"{path}.max_num_batched_tokens={self.max_num_batched_tokens}: {least}")
