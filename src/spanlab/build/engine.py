"""Builders of the engine: the model on its device, and one arm with its own pools; both import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spanlab.build import Parts
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.core.spans import PREFIXES_ALONE
from spanlab.model_spec import ModelSpec
from spanlab.settings import BatchRules, EngineSettings, StoreSettings, Strategy

if TYPE_CHECKING:
    from spanlab.engine.engine import Engine
    from spanlab.engine.model import SpanModel


@dataclass(frozen=True)
class EngineParts:
    """Settings of an engine without a study; the store has no limit unless it is set."""

    model: ModelSpec
    engine: EngineSettings
    batch: BatchRules
    store: StoreSettings = field(default_factory=StoreSettings)


def build_model(study: Parts) -> SpanModel:
    """Load the model on its device; ValueError if its sizes differ from those of the study's model."""
    from spanlab.engine.load import load_model

    return load_model(study.engine, study.model)


def build_engine(
    study: Parts, strategy: Strategy, model: SpanModel, policy: TreePolicy, requests: Sequence[Request], **more: Any
) -> Engine:
    """Build the engine of one arm, with page and state pools that hold all that its policy may store."""
    from spanlab.engine.engine import Engine
    from spanlab.engine.graphs import spare_pages
    from spanlab.engine.map_forms import form_of
    from spanlab.engine.map_pool import MapShape, SpanMaps
    from spanlab.engine.pool import PagePool, PoolShape
    from spanlab.engine.sampling import Sampler
    from spanlab.engine.sizing import pool_pages
    from spanlab.engine.state_pool import StatePool

    pages = pool_pages(policy, study.batch, requests, model.context) + spare_pages(study.engine.decode)
    shape = PoolShape(model.layers, pages, policy.store.tree.block_size, model.kv_heads, model.head_dim)
    pool = PagePool(shape, model.dtype, model.device)
    if model.state_shape is not None:
        more["states"] = StatePool(model.state_shape, model.dtype, model.device)
        if policy.rules.maps is not None:
            form, repaired = form_of(policy.rules.maps), policy.rules.repair.tokens
            more["maps"] = SpanMaps(MapShape(model.state_shape, form, model.dtype, repaired), model.device)
    sampler = Sampler(study.engine.temperature, study.engine.seed)
    positions = max(request.num_tokens + request.longest_output for request in requests)
    more |= {"positions": positions, "sampler": sampler, "decode": study.engine.decode}
    return Engine(model, pool, policy, strategy.spans or PREFIXES_ALONE, **more)
