"""Our forward equals the model's, for every rotation of queries and keys and every packing of rows."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from spanlab.engine import load
from spanlab.engine.hook import Attend
from spanlab.engine.load import named_config, random_model
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, causal_mask, dense_logits, eager_twin
from spanlab_kernels import AngleTable
from spanlab_kernels.blocks import angle_table, rotate

from .factories import ROPES, SMALL, make_choice, make_small

LENGTH = 90


def make_ids(model: SpanModel, count: int = LENGTH, seed: int = 0) -> Tensor:
    """Random tokens."""
    return torch.randint(3, model.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def own_logits(model: SpanModel, ids: Tensor) -> Tensor:
    """Transformers' logits of one prompt."""
    return dense_logits(eager_twin(model), ids, causal_mask(len(ids)), torch.arange(len(ids)))


def attention(model: SpanModel, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention [T, Hq, D] of rotated queries over rotated keys, row by row where the mask is true."""
    group = model.query_heads // model.kv_heads
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * model.scales[layer]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


def assert_close(result: Tensor, truth: Tensor, allowed: float = 1e-5) -> None:
    """Relative RMS difference, and no single number off by more than ten times that."""
    assert result.shape == truth.shape
    assert (result - truth).norm() <= allowed * truth.norm()
    assert (result - truth).abs().max() <= 10 * allowed * truth.std()


def make_table(model: SpanModel) -> AngleTable:
    """Angles of the model's own frequencies."""
    return angle_table(model.rotation.frequencies, LENGTH, model.device)


def test_logits_equal_transformers_own(model):
    ids, rows = make_ids(model), torch.arange(LENGTH)
    assert_close(model.forward(ids, rows, causal_attend(model), rows), own_logits(model, ids))


def test_positions_matter_to_a_random_model(model):
    ids, rows = make_ids(model), torch.arange(LENGTH)
    unturned = model.forward(ids, rows * 0, causal_attend(model), rows)
    truth = own_logits(model, ids)
    assert (unturned - truth).norm() > 0.5 * truth.norm(), "attention is so even that a wrong position would not show"


def turning(model: SpanModel) -> Attend:
    """Attention for rows that come unrotated: queries and keys are rotated to their places (KR)."""
    table, rows, plain = make_table(model), torch.arange(LENGTH), causal_attend(model)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rotated = (rotate(state, rows, table, interleaved=model.rotation.interleaved) for state in (query, key))
        return plain(layer, *rotated, value)

    return attend


def test_unrotated_rows_rotated_by_us_equal_transformers_own(model):
    ids, rows = make_ids(model), torch.arange(LENGTH)
    assert_close(model.forward(ids, rows * 0, turning(model), rows), own_logits(model, ids))


@pytest.mark.parametrize(
    ("architecture", "overrides", "rotary_dim", "interleaved"),
    [
        (
            "phi3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            8,
            False,
        ),
        ("glm", {}, 8, True),
        ("cohere", {}, 16, True),
        ("gemma", {"head_dim": 32}, 32, False),
        ("granite", {"attention_multiplier": 0.3}, 16, False),
    ],
)
def test_other_families_are_rotated_as_they_were_found_to(architecture, overrides, rotary_dim, interleaved):
    model = random_model(
        architecture, AutoConfig.for_model(architecture, **SMALL | {"num_hidden_layers": 2} | overrides)
    )
    ids, rows = make_ids(model), torch.arange(LENGTH)
    assert (2 * len(model.rotation.frequencies), model.rotation.interleaved) == (rotary_dim, interleaved)
    assert_close(model.forward(ids, rows * 0, turning(model), rows), own_logits(model, ids))


@pytest.mark.parametrize("kept", [{1: [5, 40, 89]}, {2: [0, 1, 2, 88, 89], 3: [1, 3, 4]}])
def test_rows_that_go_on_are_the_same_as_among_all(model, kept: dict[int, Sequence[int]]):
    ids, rows = make_ids(model), torch.arange(LENGTH)
    stored: dict[int, tuple[Tensor, Tensor]] = {}
    places = rows

    def store(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stored[layer] = (key.clone(), value.clone())
        return attention(model, layer, query, key, value, causal_mask(LENGTH))

    def keep(layer: int) -> Tensor | None:
        nonlocal places
        chosen = torch.tensor(kept[layer]) if layer in kept else None
        places = places if chosen is None else places[chosen]
        return chosen

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert len(query) == len(key) == len(value) == len(places)
        keys, values = (old.index_copy(0, places, new) for old, new in zip(stored[layer], (key, value), strict=True))
        return attention(model, layer, query, keys, values, causal_mask(LENGTH)[places])

    truth = model.forward(ids, rows, store, rows)
    last = torch.arange(len(kept[max(kept)]))
    assert_close(model.forward(ids, rows, attend, last, keep), truth[places])


def test_two_forwards_of_one_model_can_be_nested(model):
    ids, rows, plain = make_ids(model), torch.arange(LENGTH), causal_attend(model)
    inner: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if layer == 1:
            inner.append(model.forward(ids[:20], rows[:20], plain, rows[:20], lambda layer: None))
        return plain(layer, query, key, value)

    outer = model.forward(ids, rows, attend, rows)
    assert_close(outer, own_logits(model, ids))
    assert_close(inner[0], own_logits(model, ids[:20]))


def test_logits_are_of_the_rows_asked_for(model):
    ids, rows, attend = make_ids(model), torch.arange(LENGTH), causal_attend(model)
    logits_rows = torch.tensor([89, 3, 3])
    assert_close(model.forward(ids, rows, attend, logits_rows), own_logits(model, ids)[logits_rows])
    assert model.forward(ids, rows, attend, rows[:0]).shape == (0, model.vocab_size)


def test_a_forward_leaves_nothing_for_autograd(model):
    ids, rows = make_ids(model), torch.arange(LENGTH)
    logits = model.forward(ids, rows, causal_attend(model), rows[-1:])
    assert not logits.requires_grad
    logits.div_(2)  # which an inference tensor would refuse


def keys_at(model: SpanModel, positions: Tensor) -> Tensor:
    """Keys of the first layer [T, Hkv, D] as the model computes them, of the same token at all positions."""
    recorded: list[Tensor] = []

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        recorded.append(key)
        return query

    model.forward(torch.full_like(positions, 5), positions, attend, positions[:0])
    return recorded[0]


@pytest.mark.parametrize("kind", ROPES)
def test_rotating_a_key_from_zero_equals_the_model(kind):
    model, positions = make_small(rope=kind), torch.tensor([0, 1, 2, 100, 500])
    rotated = rotate(keys_at(model, positions * 0), positions, angle_table(model.rotation.frequencies, 512, "cpu"))
    assert_close(rotated, keys_at(model, positions), 1e-4)  # the model's own angles are float32


@pytest.mark.parametrize(("kind", "factor"), [("default", 1.0), ("yarn", 0.1 * math.log(4) + 1)])
def test_a_key_at_position_0_carries_the_attention_factor(kind, factor):
    model = make_small(rope=kind)
    layer = model.hf.model.layers[0]
    with torch.no_grad():
        projected = layer.self_attn.k_proj(layer.input_layernorm(model.hf.model.embed_tokens(torch.tensor([5]))))
    assert_close(keys_at(model, torch.tensor([0])).flatten(), factor * projected[0])


def test_frequencies_are_powers_of_theta(make_model):
    expected = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    assert torch.allclose(make_model("tiny").rotation.frequencies, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_leaves_the_frequencies_exact(make_model, dtype):
    half = make_choice("tiny", dtype=getattr(torch, dtype))
    assert half.dtype == getattr(torch, dtype)
    assert torch.equal(half.rotation.frequencies, make_model("tiny").rotation.frequencies)
    logits = half.forward(make_ids(half), torch.arange(LENGTH), causal_attend(half), torch.arange(LENGTH))
    assert logits.dtype == torch.float32


def test_only_weights_are_drawn_on_the_device(monkeypatch):
    """The checks after them have numbers on the host too; a default device would move those."""
    seen = []
    monkeypatch.setattr(
        load, "check_model", lambda name, model: seen.append((model.device, torch.get_default_device()))
    )
    random_model("meta", named_config("tiny"), device="meta")
    assert seen == [(torch.device("meta"), torch.device("cpu"))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_the_gpu_equals_transformers_own(dtype):
    model = make_choice("tiny", dtype=getattr(torch, dtype), device="cuda")
    ids, rows = make_ids(model).cuda(), torch.arange(LENGTH, device="cuda")
    ours = model.forward(ids, rows, causal_attend(model), rows)
    truth = dense_logits(eager_twin(model), ids, causal_mask(LENGTH, "cuda"), rows)
    assert (ours - truth).norm() < (1e-4 if dtype == "float32" else 3e-2) * truth.norm()
