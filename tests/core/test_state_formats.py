"""Bytes of stored states against arrays that hold them, and what running requests still take."""

import numpy as np
import pytest

from spanlab.core.rules import STATE_FORMATS, StateFormat
from spanlab.model_files import find_spec

from .factories import STATE, at, begin, make_budget, make_policy, make_request, serve

MODEL = find_spec("qwen3.5-0.8b")
SHAPE = (MODEL.recurrent_layers, MODEL.recurrent_value_heads, MODEL.recurrent_key_dim, MODEL.recurrent_value_dim)


def stored(kind: str) -> StateFormat:
    return STATE_FORMATS.make(kind, {}, {}, model=MODEL)


@pytest.mark.parametrize(
    ("kind", "numbers", "scales"),
    [
        ("native", np.float32, ()),
        ("bf16", np.int16, ()),
        ("int8", np.int8, SHAPE[:3]),
        ("int8_head", np.int8, SHAPE[:2]),
    ],
)
def test_bytes_are_those_of_arrays(kind, numbers, scales):
    arrays = np.empty(SHAPE, numbers).nbytes + (np.empty(scales, np.float32).nbytes if scales else 0)
    assert stored(kind).num_bytes == arrays + MODEL.conv_state_bytes


def test_a_native_state_converts_nothing():
    assert (stored("native").num_bytes, stored("native").load_flops) == (MODEL.state_bytes, 0)
    assert stored("int8").load_flops == np.empty(SHAPE, np.int8).size


def test_running_requests_keep_the_native_state():
    """A stored state has 7 bytes here, a running one 20."""
    policy = make_policy(make_budget(total=100), hybrid=True, placer=at(2, 4), state_bytes_saved=20 - STATE)
    request = make_request(range(5))
    assert policy.need(request).state_bytes == 20
    _, allocation = begin(policy, request, 0)
    assert policy.store.state_reserved == 20 + 2 * STATE
    policy.insert(allocation, 5, 0)
    assert (policy.store.state_reserved, policy.store.state_cached) == (20, 2 * STATE)
    policy.free(allocation, 0)
    assert policy.store.state_reserved == 0
    assert serve(policy, range(5), 1).resume == 4
