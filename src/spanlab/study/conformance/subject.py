"""A model under test: prompts, serving with any strategy, and the dense forward of transformers as reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanlab import build
from spanlab.build import GIB
from spanlab.build.engine import EngineParts, build_engine
from spanlab.core.batch_rules import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.core.scheduled import Sequence as Admitted
from spanlab.core.scheduler import Scheduler
from spanlab.engine.engine import Engine
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import Segment, block_mask, causal_mask, dense_logits, eager_twin
from spanlab.engine.self_check import distance
from spanlab.settings import StoreSettings, Strategy
from spanlab.settings.conformance import Conformance

ONE_BY_ONE = BatchRules(max_num_batched_tokens=8192, max_num_seqs=1)
TOGETHER = BatchRules(max_num_batched_tokens=8192, max_num_seqs=64)


@dataclass
class Served:
    """An engine with its outputs: logits by request and token, and the sequences of all requests."""

    engine: Engine
    policy: TreePolicy
    rules: BatchRules
    logits: dict[int, list[Tensor]] = field(default_factory=dict)
    sequences: dict[int, Admitted] = field(default_factory=dict)

    def serve(self, requests: Sequence[Request]) -> None:
        """Serve requests that arrive together; entries of earlier calls stay in the store."""
        scheduler = Scheduler(self.policy, self.rules)
        for request in requests:
            scheduler.add(request)
        self.sequences |= {sequence.request.id: sequence for sequence in scheduler.waiting}
        while not scheduler.idle:
            step = scheduler.schedule(0)
            assert step is not None, "requests wait, and each of them fits in the store"
            result = self.engine.execute(step, None)
            scheduler.complete(step, 0, result.finished)
            self.engine.completed(step)
        self.engine.close()

    def note(self, sequence: Admitted, row: Tensor) -> None:
        """Store the logits of a token; after a preemption, logits of the new pass replace the old ones."""
        self.logits.setdefault(sequence.request.id, [])[sequence.generated :] = [row.cpu()]

    def logits_of(self, request: Request) -> Tensor:
        """Logits of all output tokens, shape [output, V]."""
        return torch.stack(self.logits[request.id])

    def output(self, request: Request) -> list[int]:
        """Generated tokens."""
        return self.engine.outputs[request.id]

    def reused(self, request: Request) -> int:
        """Prompt tokens that the request reused at its first admission."""
        plan = self.sequences[request.id].first_plan
        assert plan is not None, "the request was served"
        return plan.reused


@dataclass(frozen=True, eq=False)
class Subject:
    """The model under test, and the settings of the prompts."""

    model: SpanModel
    settings: Conformance

    @cached_property
    def reference_model(self) -> PreTrainedModel:
        """The same weights with the attention of transformers."""
        return eager_twin(self.model)

    @property
    def limit(self) -> float:
        """Largest relative difference of logits that rounding explains."""
        return 1e-3 if self.model.dtype == torch.float32 else 5e-2

    @property
    def output(self) -> int:
        """Output tokens of each prompt."""
        return self.settings.output_tokens

    def random_span(self, name: int, length: int) -> Span:
        """Dependent span of random tokens, equal for equal name and length."""
        draw = np.random.default_rng([name, length])
        return Span(draw.integers(0, self.model.vocab_size, length).astype(np.int32))

    def document(self, name: int) -> Span:
        """Independent span of random tokens; documents differ in length."""
        longest = self.settings.document_tokens
        return Span(self.random_span(1000 + name, max(2, longest - 5 * name % longest)).tokens, independent=True)

    def questions(self, head: int = 7) -> list[Request]:
        """Prompts of the same documents, each in another order and with a different question."""
        documents = [self.document(number) for number in range(self.settings.documents)]
        opening = (self.random_span(0, head),) if head else ()
        return [
            self.request(
                number, *opening, *np.roll(np.array(documents, object), number), self.random_span(1 + number, 9)
            )
            for number in range(self.settings.prompts)
        ]

    def request(self, number: int, *spans: Span, salt: str = "") -> Request:
        """Request of these spans with id `number`."""
        return Request(number, 0, spans, self.output, cache_salt=salt)

    def start(
        self, strategy: Strategy, requests: Sequence[Request], rules: BatchRules = ONE_BY_ONE, tokens: int | None = None
    ) -> Served:
        """Build an engine with an empty store for the requests; `tokens` limits the KV of running and stored tokens."""
        spec = self.settings.model
        gib = None if tokens is None else (tokens * spec.kv_bytes_per_token + 1) / GIB
        config = EngineParts(spec, self.settings.engine, rules, StoreSettings(kv_gib=gib))
        longest = max(request.num_tokens for request in requests)
        policy = build.build_policy(config, strategy, 0, longest)
        assert isinstance(policy, TreePolicy), "these strategies are served by trees"

        def note(sequence: Admitted, row: Tensor) -> None:
            served.note(sequence, row)

        served = Served(build_engine(config, strategy, self.model, policy, requests, on_logits=note), policy, rules)
        return served

    def serve(self, strategy: Strategy, requests: Sequence[Request], rules: BatchRules = ONE_BY_ONE) -> Served:
        """Serve requests from an empty store."""
        served = self.start(strategy, requests, rules)
        served.serve(requests)
        return served

    def max_difference(self, served: Served, requests: Sequence[Request], *, blocks: bool = False) -> float:
        """Largest relative difference of the requests' logits to the dense forward of the same tokens."""
        return max(
            distance(served.logits_of(request), self.dense(request, served.output(request), blocks=blocks))
            for request in requests
        )

    def dense(self, request: Request, output: Sequence[int], *, blocks: bool = False) -> Tensor:
        """Logits [output, V] of a dense forward of prompt and output: causal, or block-masked where `blocks`."""
        ids = torch.from_numpy(np.concatenate([request.tokens, np.array(output[:-1], np.int64)]).astype(np.int64))
        device = self.model.device
        mask = block_mask(_segments(request, len(ids)), device=device) if blocks else causal_mask(len(ids), device)
        positions = torch.arange(len(ids), device=device)
        return dense_logits(self.reference_model, ids.to(device), mask, positions)[request.num_tokens - 1 :].cpu()


def _segments(request: Request, length: int) -> list[Segment]:
    """Spans of a prompt as ranges of rows; the last span extends to `length`."""
    ends = np.cumsum([len(span.tokens) for span in request.spans]).tolist()
    starts, ends = [0, *ends[:-1]], [*ends[:-1], length]
    return [Segment(start, end, span.independent) for start, end, span in zip(starts, ends, request.spans, strict=True)]
