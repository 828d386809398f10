"""The cost in FLOPs: a token deep in a prompt attends to more tokens than one at its start."""

from __future__ import annotations

from spanlab.core.cost.contract import COSTS, Cost
from spanlab.model_spec import ModelSpec


@COSTS.register("flops")
def flops(*, model: ModelSpec) -> Cost:
    """`flops`: the model's FLOPs, those of attention by depth; without the output head."""
    return model.prefill_flops
