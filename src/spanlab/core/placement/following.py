"""Placements of states while tokens are computed: at ends of chunks, and in the output.

The batch determines where the chunks of a prompt end, and a server does not know the length of an output in advance. A
request holds the states of its output until it finishes, and stores them with the output up to the last state. A
preempted request loses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spanlab.core.placement.contract import PLACEMENTS, ArmFacts, PrefillInfo
from spanlab.core.progress import Progress

#: A need of these placements: a policy that follows the progress of its requests.
PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class Following:
    """A placement without positions at admission; `progress` gives positions later."""

    progress: Progress

    def observe(self, prefill: PrefillInfo) -> None:
        """Do nothing: this placement learns nothing."""

    def place(self, prefill: PrefillInfo) -> Sequence[int]:
        """Return no positions: they are not known yet."""
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
