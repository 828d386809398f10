"""A span's affine map, compared with the scan over all spans."""

import math
from functools import partial, reduce
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from spanlab.engine.maps import (
    AffineMap,
    Transition,
    affine_scan,
    assemble,
    compose,
    exact,
    heads_above,
    low_rank,
    scalar,
    spectral_norm,
)

LENGTHS = st.lists(st.integers(1, 700), min_size=2, max_size=4)


class Inputs(NamedTuple):
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


def draw(length: int, seed: int = 0, key_width: int = 8, value_width: int = 12, forgetting: float = 1e-3) -> Inputs:
    """Inputs of two key heads and four value heads that forget so slowly that A is far from zero."""
    random = torch.Generator().manual_seed(seed)
    key = torch.randn(1, length, 2, key_width, generator=random)
    value = torch.randn(1, length, 4, value_width, generator=random)
    g = -forgetting * torch.rand(1, length, 4, generator=random)
    return Inputs(key, value, g, 0.1 * torch.rand(1, length, 4, generator=random))


def affine_maps(key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> AffineMap:
    """The maps of spans alone, with keys normalised as the mixers have their scan do."""
    return affine_scan(key, key, value, g, beta, use_qk_l2norm_in_kernel=True)[1]


def dropped_norm(span: AffineMap, stored: Transition) -> Tensor:
    """The spectral norm of the part of A that a stored form omits."""
    identity = torch.eye(span.transition.shape[-1]).expand_as(span.transition)
    return spectral_norm(span.transition - stored.apply(identity))


def cut(inputs: Inputs, lengths: list[int]) -> list[AffineMap]:
    pieces = zip(*(tensor.split(lengths, dim=1) for tensor in inputs), strict=True)
    return [affine_maps(*piece) for piece in pieces]


def run_through(inputs: Inputs, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    key, value, g, beta = inputs
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return torch_chunk_gated_delta_rule(key, key, value, g=g, beta=beta, **options)


def start(inputs: Inputs) -> Tensor:
    return torch.randn(1, 4, inputs.key.shape[-1], inputs.value.shape[-1], generator=torch.Generator().manual_seed(9))


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 1000))
def test_composition_equals_running_through(lengths: list[int], seed: int) -> None:
    inputs = draw(sum(lengths), seed)
    state = start(inputs)
    composed = reduce(compose, cut(inputs, lengths))
    torch.testing.assert_close(composed.apply(state), run_through(inputs, state)[1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(composed.decay, affine_maps(*inputs).decay)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 2000])
@pytest.mark.parametrize(("key_width", "value_width"), [(8, 12), (12, 8), (8, 8)])
def test_map_equals_scan_at_any_width(length: int, key_width: int, value_width: int) -> None:
    inputs = draw(length, key_width=key_width, value_width=value_width)
    state, span = start(inputs), affine_maps(*inputs)
    torch.testing.assert_close(span.apply(state), run_through(inputs, state)[1], atol=2e-5, rtol=1e-4)


def test_slow_decay_leaves_transition_to_see() -> None:
    assert spectral_norm(affine_maps(*draw(64)).transition).min() > 0.1


def test_outputs_are_those_of_the_plain_scan() -> None:
    inputs = draw(130)
    outputs, _ = affine_scan(inputs.key, *inputs, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(outputs, run_through(inputs)[0], atol=1e-5, rtol=1e-4)


def test_gradient_reaches_the_spans_inputs() -> None:
    inputs = Inputs(*(tensor.requires_grad_() for tensor in draw(70)))
    affine_maps(*inputs).apply(start(inputs)).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in inputs)


def test_transition_less_decay_has_low_rank() -> None:
    span = affine_maps(*draw(3))
    torch.testing.assert_close(
        low_rank(span, 3).apply(torch.eye(8).expand(1, 4, 8, 8)), span.transition, atol=1e-6, rtol=1e-5
    )
    assert dropped_norm(span, low_rank(span, 2)).min() > 1e-4


@pytest.mark.parametrize(
    ("forgetting", "form", "most"),
    [
        *((1e-3, partial(low_rank, rank=rank), math.inf) for rank in (0, 1, 2, 4)),
        *((0.01, partial(heads_above, norm=norm), norm) for norm in (0.0, 0.5, 2.0)),
        (1e-3, partial(exact, dtype=torch.bfloat16), 0.01),
    ],
    ids=[*(f"rank {rank}" for rank in (0, 1, 2, 4)), *(f"norm above {norm}" for norm in (0, 0.5, 2)), "bfloat16"],
)
def test_error_of_stored_forms_is_bounded_by_what_they_drop(forgetting, form, most):
    inputs = draw(256, forgetting=forgetting)
    span, state = affine_maps(*inputs), start(inputs)
    stored = form(span)
    dropped = dropped_norm(span, stored)
    off = torch.linalg.matrix_norm(stored.apply(state) - span.transition @ state)
    assert (off <= dropped * torch.linalg.matrix_norm(state) + 1e-6).all()
    assert dropped.max() <= most


def test_bytes_count_what_is_stored() -> None:
    span = affine_maps(*draw(64))
    heads, width = 4, 8
    assert exact(span).nbytes == heads * width * width * 4
    assert exact(span, torch.bfloat16).nbytes == heads * width * width * 2
    assert low_rank(span, 2, torch.bfloat16).nbytes == heads * (4 + 2 * 2 * width * 2)
    assert scalar(span.decay, width).nbytes == heads * 4
    assert heads_above(span, 2.0).nbytes == heads


def test_scalar_forms_scale_the_whole_state() -> None:
    inputs = draw(64)
    span, state = affine_maps(*inputs), start(inputs)
    torch.testing.assert_close(scalar(span.decay, 8).apply(state), span.decay[..., None, None] * state)


def test_assembly_of_exact_forms_equals_composition() -> None:
    inputs = draw(200)
    spans, state = cut(inputs, [50, 150]), start(inputs)
    assembled = assemble([(exact(span), span.state) for span in spans], state)
    torch.testing.assert_close(assembled, reduce(compose, spans).apply(state), atol=1e-5, rtol=1e-4)
