"""A step of one fixed shape on the engine: what it takes now and took before is how far the machine drifts."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from spanlab import build
from spanlab.build.engine import build_engine
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.model_spec import ModelSpec
from spanlab.settings import BatchRules, EngineSettings, StoreSettings, Strategy

TOKENS = 256  # of the prompt, or as many as the model has positions for
TIMES = 5


@dataclass(frozen=True)
class Parts:
    """What the makers of policies and engines read of a study: no limits, and a batch of one."""

    model: ModelSpec
    engine: EngineSettings
    batch: BatchRules = field(default_factory=lambda: BatchRules(max_num_batched_tokens=TOKENS, max_num_seqs=1))
    store: StoreSettings = field(default_factory=StoreSettings)


class FixedStep:
    """One prefill of a prompt that is always the same, over an engine that keeps nothing."""

    def __init__(self, spec: ModelSpec, engine: EngineSettings, model: Any) -> None:
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, min(TOKENS, model.context - 1))
        self._request = Request(0, 0, (Span(tokens.astype(np.int32)),), output_len=1)
        parts = Parts(spec, engine)
        self._rules, strategy = parts.batch, Strategy(family="none", keep=False)
        policy = build.build_policy(parts, strategy, 0, TOKENS)
        assert isinstance(policy, TreePolicy), "an arm that keeps nothing is served by a tree"
        self._engine = build_engine(parts, strategy, model, policy, [self._request])
        self._once()

    def measure(self) -> int:
        """Nanoseconds, the median of some times in a row."""
        return int(median([self._once() for _ in range(TIMES)]))

    def _once(self) -> int:
        from spanlab_sim.run import serve

        row = serve([self._request], self._engine.policy, self._rules, self._engine, lambda record: None)
        return round(row.busy_s * 1e9)
