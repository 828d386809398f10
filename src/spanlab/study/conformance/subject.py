"""A model under test: prompts, serving them by any strategy, and transformers' own dense forward beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab import build
from spanlab.build.engine import build_engine
from spanlab.core.batch_rules import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduled import Sequence as Admitted
from spanlab.core.scheduler import Scheduler
from spanlab.engine.engine import Engine
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import Segment, block_mask, causal_mask, dense_logits, eager_twin
from spanlab.engine.self_check import distance
from spanlab.engine.settings import EngineSettings
from spanlab.model_spec import ModelSpec
from spanlab.settings import StoreSettings, Strategy
from spanlab.settings.conformance import Conformance

GIB = 1 << 30
ONE_BY_ONE = BatchRules(max_num_batched_tokens=8192, max_num_seqs=1)
TOGETHER = BatchRules(max_num_batched_tokens=8192, max_num_seqs=64)


@dataclass(frozen=True)
class _Parts:
    model: ModelSpec
    engine: EngineSettings
    store: StoreSettings
    batch: BatchRules


@dataclass
class Served:
    """An engine, and what came out of it: logits by request and token, and the sequences of all requests."""

    engine: Engine
    policy: TreePolicy
    rules: BatchRules
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    sequences: dict[int, Admitted] = field(default_factory=dict)

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve requests that arrive together, on what is stored already."""
        scheduler = Scheduler(self.policy, self.rules)
        for request in requests:
            scheduler.add(request)
        self.sequences |= {sequence.request.id: sequence for sequence in scheduler.waiting}
        while not scheduler.idle:
            step = scheduler.schedule(0)
            assert step is not None, "requests wait, and the store holds each of them"
            result = self.engine.execute(step, None)
            scheduler.complete(step, 0, result.finished)
            self.engine.completed(step)
        self.engine.close()

    def note(self, sequence: Admitted, row: Tensor) -> None:
        """Keep the logits of a token; of a request that was preempted, those of its last pass."""
        self.logits.setdefault(sequence.request.id, [])[sequence.generated :] = [row.cpu()]

    def of(self, request: Request) -> Tensor:
        """Logits of all output tokens, [output, V]."""
        return torch.stack(self.logits[request.id])

    def output(self, request: Request) -> list[int]:
        """Generated tokens."""
        return self.engine.outputs[request.id]

    def reused(self, request: Request) -> int:
        """Prompt tokens that were not computed when the request was first admitted."""
        plan = self.sequences[request.id].first_plan
        assert plan is not None, "the request was served"
        return plan.reused


@dataclass(frozen=True, eq=False)
class Subject:
    """The model, and how long prompts are."""

    model: SpanModel
    settings: Conformance

    @cached_property
    def twin(self) -> PreTrainedModel:
        """The same weights under transformers' own attention."""
        return eager_twin(self.model)

    @property
    def limit(self) -> float:
        """Relative difference of logits that rounding explains."""
        return 1e-3 if self.model.dtype == torch.float32 else 5e-2

    @property
    def output(self) -> int:
        """Tokens that each prompt generates."""
        return self.settings.output_tokens

    def words(self, name: int, length: int) -> Span:
        """Ordered text of random tokens, the same for the same name and length."""
        draw = np.random.default_rng([name, length])
        return Span(draw.integers(0, self.model.vocab_size, length).astype(np.int32))

    def document(self, name: int) -> Span:
        """An independent span; documents differ in length."""
        longest = self.settings.document_tokens
        return Span(self.words(1000 + name, max(2, longest - 5 * name % longest)).tokens, independent=True)

    def questions(self, head: int = 7) -> list[Request]:
        """Prompts of the same documents, each in another order, with a question of its own."""
        documents = [self.document(number) for number in range(self.settings.documents)]
        opening = (self.words(0, head),) if head else ()
        return [
            self.ask(number, *opening, *np.roll(np.array(documents, object), number), self.words(1 + number, 9))
            for number in range(self.settings.prompts)
        ]

    def ask(self, number: int, *spans: Span, salt: str = "") -> Request:
        """One prompt."""
        return Request(number, 0, spans, self.output, cache_salt=salt)

    def start(
        self, strategy: Strategy, requests: Sequence[Request], rules: BatchRules = ONE_BY_ONE, tokens: int | None = None
    ) -> Served:
        """An engine with an empty store for the requests; `tokens` limits the KV of all that runs and is stored."""
        spec = self.settings.model
        gib = None if tokens is None else (tokens * spec.kv_bytes_per_token + 1) / GIB
        parts = _Parts(spec, self.settings.engine, StoreSettings(kv_gib=gib), rules)
        longest = max(request.num_tokens for request in requests)
        notes: list[Callable[[Admitted, Tensor], None]] = []
        policy = build.build_policy(parts, strategy, 0, longest)
        assert isinstance(policy, TreePolicy), "these strategies are served by trees"

        def note(sequence: Admitted, row: Tensor) -> None:
            notes[0](sequence, row)

        served = Served(build_engine(parts, strategy, self.model, policy, requests, on_logits=note), policy, rules)
        notes.append(served.note)
        return served

    def serve(self, strategy: Strategy, requests: Sequence[Request], rules: BatchRules = ONE_BY_ONE) -> Served:
        """Serve requests from an empty store."""
        served = self.start(strategy, requests, rules)
        served.serve(requests)
        return served

    def off(self, served: Served, requests: Sequence[Request], *, blocks: bool = False) -> float:
        """The largest relative difference of logits to the dense forward of what was said."""
        return max(distance(served.of(one), self.dense(one, served.output(one), blocks=blocks)) for one in requests)

    def dense(self, request: Request, output: Sequence[int], *, blocks: bool = False) -> Tensor:
        """Logits [output, V] of a causal forward of prompt and output, or where documents see themselves alone."""
        ids = torch.from_numpy(np.concatenate([request.tokens, np.array(output[:-1], np.int64)]).astype(np.int64))
        device = self.model.device
        mask = block_mask(_segments(request, len(ids)), device=device) if blocks else causal_mask(len(ids), device)
        positions = torch.arange(len(ids), device=device)
        return dense_logits(self.twin, ids.to(device), mask, positions)[request.num_tokens - 1 :].cpu()


def _segments(request: Request, length: int) -> list[Segment]:
    """A prompt's spans as rows; the last one, which is ordered, reaches to `length`."""
    ends = np.cumsum([len(span.tokens) for span in request.spans]).tolist()
    starts, ends = [0, *ends[:-1]], [*ends[:-1], length]
    return [Segment(start, end, span.independent) for start, end, span in zip(starts, ends, request.spans, strict=True)]
