"""Formats of stored recurrent states; a running request has its state in the model's format.

The inputs of the convolution are stored unchanged. Quantising compares, multiplies and rounds every number,
dequantising multiplies it. Rounded states change what follows: docs/engine.md says by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry

SCALE_BYTES = 4  # a float32


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Size and conversion cost of one stored state.

    `num_bytes`  its bytes, scales and the convolution's inputs included
    `store_flops`, `load_flops`  operations of converting it into the format, and back
    """

    num_bytes: int
    store_flops: int = 0
    load_flops: int = 0


#: `model` is the study's.
STATE_FORMATS: Registry[StateFormat] = Registry("state format", given=("model",))


def _numbers(model: ModelSpec) -> int:
    """Numbers of the recurrent states of all layers."""
    return _rows(model) * model.recurrent_value_dim


def _rows(model: ModelSpec) -> int:
    """Rows of these states: one per key channel, value head and layer."""
    return model.recurrent_layers * model.recurrent_value_heads * model.recurrent_key_dim


@STATE_FORMATS.register("native")
def native(*, model: ModelSpec) -> StateFormat:
    """`native`: as the model computes it."""
    return StateFormat(model.state_bytes)


@STATE_FORMATS.register("bf16")
def bf16(*, model: ModelSpec) -> StateFormat:
    """`bf16`: two bytes a number, rounded."""
    numbers = _numbers(model)
    return StateFormat(2 * numbers + model.conv_state_bytes, numbers, numbers)


@STATE_FORMATS.register("int8")
def int8(*, model: ModelSpec) -> StateFormat:
    """`int8`: one byte a number, and a scale for each row of value channels."""
    numbers = _numbers(model)
    return StateFormat(numbers + SCALE_BYTES * _rows(model) + model.conv_state_bytes, 3 * numbers, numbers)


@STATE_FORMATS.register("int8_head")
def int8_head(*, model: ModelSpec) -> StateFormat:
    """`int8_head`: one byte a number, and a scale for each value head of a layer."""
    numbers, heads = _numbers(model), model.recurrent_layers * model.recurrent_value_heads
    return StateFormat(numbers + SCALE_BYTES * heads + model.conv_state_bytes, 3 * numbers, numbers)
