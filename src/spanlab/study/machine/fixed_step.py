"""A step of fixed shape on the engine; changes of its duration over a study measure the machine's drift."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from spanlab import build
from spanlab.build.engine import EngineParts, build_engine
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request, Span
from spanlab.model_spec import ModelSpec
from spanlab.settings import BatchRules, EngineSettings, Strategy

TOKENS = 256  # of the prompt, fewer where the model's context is shorter
REPEATS = 5


class FixedStep:
    """One prefill of a constant prompt, on an engine that stores no prefix."""

    def __init__(self, spec: ModelSpec, engine: EngineSettings, model: Any) -> None:
        tokens = np.random.default_rng(0).integers(0, model.vocab_size, min(TOKENS, model.context - 1))
        self._request = Request(0, 0, (Span(tokens.astype(np.int32)),), output_len=1)
        self._rules = BatchRules(max_num_batched_tokens=TOKENS, max_num_seqs=1)
        config, strategy = EngineParts(spec, engine, self._rules), Strategy(family="none", keep=False)
        policy = build.build_policy(config, strategy, 0, TOKENS)
        assert isinstance(policy, TreePolicy), "an arm that stores nothing uses the policy `tree`"
        self._engine = build_engine(config, strategy, model, policy, [self._request])
        self._serve()

    def measure(self) -> int:
        """Median duration in nanoseconds over a few steps in a row."""
        return int(median([self._serve() for _ in range(REPEATS)]))

    def _serve(self) -> int:
        from spanlab_sim.run import serve

        row = serve([self._request], self._engine.policy, self._rules, self._engine, lambda record: None)
        return round(row.busy_s * 1e9)
