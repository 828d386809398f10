"""The search `ratio`: split of a hybrid model's memory between states and KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from spanlab.core.request import Request
from spanlab.model_spec import ModelSpec
from spanlab.settings import StoreSettings
from spanlab.settings.plan import SEARCHES
from spanlab.study.plan.planner import Planner
from spanlab.study.plan.scan import scan
from spanlab.study.plan.search_result import Axis, Mark, SearchResult

AXIS = Axis("ratio", "states ÷ KV (bytes)")
#: SGLang splits memory as mamba_full_memory_ratio = states ÷ KV. Its default, and its formula for a balanced split:
#: states that a running request takes (5 with its radix cache) × state bytes ÷ (KV bytes per token × mean length).
SGLANG_DEFAULT = 0.9
SGLANG_SLOTS = 5
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, SGLANG_DEFAULT, 1.3, 2.0, 3.0, 5.0, 8.0)


@SEARCHES.register("ratio")
def ratio(planner: Planner) -> SearchResult:
    """Try the study's memory as two pools, at every ratio that the largest request fits."""
    study, total = planner.study, planner.study.store.total_gib
    assert total is not None, "the settings let no other memory pass"
    rule = balanced(study.model, planner.requests)
    ratios = sorted({*RATIOS, float(f"{rule:.3g}")})
    stores = {value: replace(study.store, state_ratio=value) for value in ratios}
    points = {
        value: replace(planner.study_point, store=store)
        for value, store in stores.items()
        if _fits_largest(planner, store)
    }
    if not points:
        raise ValueError(f"store.total_gib={total} with plan.search=ratio: expected memory for the largest request")
    marks = (Mark("SGLang's default", SGLANG_DEFAULT), Mark("SGLang's formula", rule))
    return scan(planner, AXIS, points, lambda value: f"states ÷ KV = {value:g}", marks)


def balanced(model: ModelSpec, requests: Sequence[Request]) -> float:
    """Return the ratio at which both pools fill up together, by SGLang's formula."""
    length = np.mean([request.num_tokens + request.output_len for request in requests])
    return float(SGLANG_SLOTS * model.state_bytes / (model.kv_bytes_per_token * length))


def _fits_largest(planner: Planner, store: StoreSettings) -> bool:
    """Return whether both pools have the memory of the largest request alone."""
    kv_gib, state_gib = store.pools_gib
    assert kv_gib is not None and state_gib is not None, "both pools are limited"
    need = planner.need_gib(planner.strategy)
    return need.kv <= kv_gib and need.states <= state_gib
