"""Placements of states as tokens are computed: at ends of chunks, and in the output.

What a batch leaves for a prompt decides where its chunks end, and no server knows how long an output will be. A request
holds its states of the output until it ends, and stores them with the output up to the last of them; a preempted one
loses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, PrefillInfo
from spanlab.core.progress import Progress

#: What the program must prepare for these placements: a policy that follows the progress of its requests.
PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Following:
    """A placement that places nothing at admission."""

    progress: Progress

    def observe(self, prefill: PrefillInfo) -> None:
        """It learns nothing."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Positions are known later."""
        return ()


@PLACEMENTS.register("chunk_end", needs=(PROGRESS,))
def chunk_end(*, facts: ArmFacts) -> Following:
    """`chunk_end`: at the last unit of every chunk of the prompt, as vLLM's align mode and SGLang for Kimi K3 do."""
    return Following(Progress(chunk=facts.unit))


@PLACEMENTS.register("decode_interval", needs=(PROGRESS,))
def decode_interval(interval: int) -> Following:
    """`decode_interval`: every `interval` tokens of the output; compare vllm-project/vllm#50551."""
    return Following(Progress(interval=interval))


@PLACEMENTS.register("response_end", needs=(PROGRESS,))
def response_end(interval: int | None = None, *, facts: ArmFacts) -> Following:
    """`response_end`: the last multiple of `interval`, None: of the unit, that the output reaches.

    A server copies the running state at every multiple and keeps the newest copy. Sources: vllm-project/vllm#49574,
    and the `extra_buffer` strategy of SGLang, whose interval is 256.
    """
    return Following(Progress(newest=facts.unit if interval is None else interval))
