"""A model as transformers runs it, without a cache between requests, beside which our engine is
measured."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.core.step import ScheduledSequence, ScheduledStep, StepResult, finished_after
from spanlab.engine.engine import PHASES


class PlainForward:
    """Backend of a serving loop that computes each prompt whole, as a plain transformers program
    does.

    A prompt is one forward, in the step of its last chunk; each token of an answer is another one.
    Sequences do not share a forward. Answers are sampled greedily. Step durations are measured and
    include host work.

    `outputs`  tokens generated so far, by request id
    `counter`  nanoseconds of a monotonic clock
    """

    def __init__(self, twin: PreTrainedModel, counter: Callable[[], int] = monotonic_ns) -> None:
        self._twin, self.outputs = twin, dict[int, list[int]]()
        self._caches: dict[ScheduledSequence, Any] = {}  # of the requests that are running
        self._counter, self._since = counter, counter()

    def resume(self) -> None:
        """Restart the clock of the next step."""
        self._since = self._counter()

    def execute(self, step: ScheduledStep, deadline_ns: int | None) -> StepResult:
        """Execute a scheduled step; its duration is measured from the end of the previous step."""
        began = self._counter()
        for chunk in step.chunks:
            if chunk.last:
                self._compute(chunk.sequence, None)
        for sequence in step.decodes:
            self._compute(sequence, self._caches.get(sequence))
        finished = finished_after(step)
        for sequence in finished:
            del self._caches[sequence]
        before, self._since = self._since, self._counter()
        phases = dict.fromkeys(PHASES, 0.0)
        phases |= {"plan_s": (began - before) * 1e-9, "prefill_s": (self._since - began) * 1e-9}
        return StepResult(self._since - before, finished, 1, phases)

    def completed(self, step: ScheduledStep) -> None:
        """Do nothing: no policy stores what this backend computes."""

    def close(self) -> None:
        """Free the memory of the requests."""
        self._caches.clear()

    @torch.inference_mode()
    def _compute(self, sequence: ScheduledSequence, cache: Any) -> None:
        """Append the next token of a sequence; without a `cache`, all its tokens so far are
        computed."""
        request = sequence.request
        output = self.outputs.setdefault(request.id, [])
        ids = self._ids(sequence, output) if cache is None else torch.tensor([output[-1]])
        out = self._twin(
            input_ids=ids[None].to(self._twin.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._caches[sequence] = out.past_key_values
        output.append(int(out.logits[0, -1].argmax()))

    @staticmethod
    def _ids(sequence: ScheduledSequence, output: list[int]) -> Tensor:
        prompt = torch.from_numpy(sequence.request.string.array().astype("int64"))
        return torch.cat([prompt, torch.tensor(output, dtype=torch.int64)])
