"""Policies of the shipped presets, with sizes that can be counted by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from omegaconf import OmegaConf

from spanlab.build import build_policy
from spanlab.core.admission import BatchRules
from spanlab.core.protocol import Policy
from spanlab.model_spec import GIB
from spanlab.settings import StoreSettings, Strategy

STRATEGIES = Path(__file__).parents[2] / "conf" / "strategy"


def build(
    name: str, *, total: int, states: int | None = None, state: int = 0, grid: int = 1, **changes: object
) -> Policy:
    """A preset over `total` bytes: one byte for a token, `state` for a recurrent state, 0 where there is none.

    `states`   bytes that all states may take; None: no limit of their own
    `changes`  keys of the strategy that are set otherwise
    """
    loaded = OmegaConf.load(STRATEGIES / f"{name}.yaml")
    strategy = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Strategy), loaded, changes))
    strategy.check(f"arms.{name}")
    model = SimpleNamespace(
        name="toy",
        is_hybrid=state > 0,
        grid=grid,
        kv_bytes_per_token=1,
        state_bytes=state,
        layer_state_bytes=lambda drafts: state,
        layer_kv_bytes=1,
        drafter_layer_bytes=1,
        block_size=16,
        attention_layers=1,
        recurrent_layers=int(state > 0),
        exports_states=False,
        attention_first=False,
        local=(),
        packed=[],
        bounded=(),
        prefill_flops=lambda start, stop: stop - start,
    )
    store = StoreSettings(total_gib=total / GIB, state_gib=None if states is None else states / GIB)
    study = SimpleNamespace(
        model=model, store=store, batch=BatchRules(), hardware=SimpleNamespace(compute_capability=0)
    )
    return build_policy(study, strategy, 0, 1 << 20)
