"""Recoveries of a state after a gap, compared with the exact forward of all layers; compressed states."""

import pytest
import torch
from probe_model import Memory, extend_memory, new_probe, question_logits
from probe_settings import ProbeModel
from tail_replay import FORMATS, RECOVERIES, Gap, capture_memories, price
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spanlab.engine.load import named_config
from spanlab.model_files import find_spec

PROMPT, GAP = 39, 17
ATTENTION = [3, 7]


@pytest.fixture
def model(model: PreTrainedModel) -> PreTrainedModel:
    """Two groups of layers with concentrated attention."""
    for layer in ATTENTION:
        nn.init.constant_(model.model.layers[layer].self_attn.q_norm.weight, 3.0)
    return model


@torch.no_grad()
def gap_of(model: PreTrainedModel, ids: Tensor, gap: int = GAP) -> Gap:
    start = ids.shape[1] - gap
    memories = capture_memories(model, ids, [start])
    return Gap(model, memories[start], memories[ids.shape[1]], ids[:, start:])


@torch.no_grad()
def errors(recovered: Memory, gap: Gap) -> list[float]:
    """Relative error of the state of each recurrent layer."""
    pairs = ((recovered.recurrent[layer], exact) for layer, exact in gap.resident.recurrent.items())
    return [float((state - exact).norm() / exact.norm()) for state, exact in pairs]


@pytest.fixture
def ids(case: tuple[Tensor, Tensor]) -> Tensor:
    return case[0].flatten(1)


@torch.no_grad()
@pytest.mark.parametrize("gap", [1, 2, 17, 38])
def test_queries_on_resident_kv_are_exact(model: PreTrainedModel, ids: Tensor, case: tuple[Tensor, Tensor], gap: int):
    behind = gap_of(model, ids, gap)
    recovered = RECOVERIES["resident_kv"](behind)
    assert max(errors(recovered, behind)) < 1e-5
    for layer, conv in behind.resident.conv.items():
        torch.testing.assert_close(recovered.conv[layer], conv, atol=1e-5, rtol=1e-5)
    logits = [question_logits(model, memory, case[1]) for memory in (recovered, behind.resident)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_exact_replay_projects_no_keys_and_values(model: PreTrainedModel, ids: Tensor):
    behind = gap_of(model, ids)
    for layer in ATTENTION:
        for projection in (model.model.layers[layer].self_attn.k_proj, model.model.layers[layer].self_attn.v_proj):
            projection.weight.fill_(torch.nan)
    last = model.model.layers[7]
    last.mlp.down_proj.weight.fill_(torch.nan)  # nothing above the last recurrent block runs either
    last.self_attn.q_proj.weight.fill_(torch.nan)
    assert max(errors(RECOVERIES["resident_kv"](behind), behind)) < 1e-5


@torch.no_grad()
def test_exact_replay_reads_resident_kv(model: PreTrainedModel, ids: Tensor):
    behind = gap_of(model, ids)
    keys, _ = behind.resident.kv[3]
    keys[:, :, PROMPT - 1] = keys[:, :, 0]  # a key of the gap itself
    layer_errors = errors(RECOVERIES["resident_kv"](behind), behind)
    assert max(layer_errors[:3]) < 1e-5
    assert min(layer_errors[3:]) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in RECOVERIES if name.startswith("tail_replay")])
def test_tail_replay_errs_above_attention(model: PreTrainedModel, ids: Tensor, name: str):
    behind = gap_of(model, ids)
    layer_errors = errors(RECOVERIES[name](behind), behind)
    assert layer_errors[0] < 1e-5
    assert ("alone" in name) == (max(layer_errors[1:3]) > 1e-3)
    assert min(layer_errors[3:]) > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "silenced"),
    [
        ("tail_replay", "self_attn.o_proj"),
        ("tail_replay, attention layers skipped", "self_attn.o_proj mlp.down_proj"),
        ("tail_replay, mixers alone", "self_attn.o_proj mlp.down_proj every"),
    ],
)
def test_replay_is_exact_where_nothing_is_missing(model: PreTrainedModel, ids: Tensor, name: str, silenced: str):
    *blocks, layers = silenced.split() if "every" in silenced else (*silenced.split(), "attention")
    for number in range(7) if layers == "every" else ATTENTION:
        for block in blocks:
            if block.startswith("mlp") or number in ATTENTION:
                model.model.layers[number].get_submodule(block).weight.zero_()
    behind = gap_of(model, ids)
    assert max(errors(RECOVERIES[name](behind), behind)) < 1e-5


@torch.no_grad()
def test_tail_replay_is_exact_below_all_attention(ids: Tensor):
    torch.manual_seed(0)
    model = new_probe(ProbeModel(groups=1, hidden=32, heads=2, head_dim=16), 64).eval()
    behind = gap_of(model, ids)
    assert max(errors(RECOVERIES["tail_replay"](behind), behind)) < 1e-5
    assert min(errors(RECOVERIES["no_replay"](behind), behind)) > 0.1


@torch.no_grad()
def test_captures_equal_one_prefill(model: PreTrainedModel, ids: Tensor):
    memories = capture_memories(model, ids, [5, 21])
    assert list(memories) == [5, 21, PROMPT]
    extended = extend_memory(model, memories[21], ids[:, 21:])
    prefill = capture_memories(model, ids, [])[PROMPT]
    for layer, state in prefill.recurrent.items():
        torch.testing.assert_close(extended.recurrent[layer], state, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(memories[PROMPT].recurrent[layer], state, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shared", "scales"),
    [("int8 per head", (-2, -1), 1), ("int8 per row", (-1,), 6), ("int8 per column", (-2,), 5)],
)
def test_int8_states_err_by_half_a_step(name: str, shared: tuple[int, ...], scales: int):
    state = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    state[0, 0] = 0.0
    stored = FORMATS[name](state)
    step = state.abs().amax(shared, keepdim=True) / 127
    assert ((stored.state() - state).abs() <= 0.501 * step).all()
    assert not torch.equal(stored.state(), state)
    assert stored.nbytes == state.numel() + 4 * 6 * scales


def test_price_counts_the_blocks_that_run():
    """Compare with the weights of transformers' modules that run, for tokens that see only themselves."""
    spec = find_spec("tiny-hybrid")
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(named_config("tiny-hybrid")).model.layers
    attention = [layer for layer in layers if hasattr(layer, "self_attn")]
    last = max(number for number, layer in enumerate(layers) if hasattr(layer, "linear_attn"))
    skipped = {
        "resident_kv": [layers[last].mlp, *_submodules(layers[-1], "mlp", "self_attn.q_proj", "self_attn.o_proj")],
        "tail_replay": [layers[last].mlp, layers[-1].mlp],
        "tail_replay, attention layers skipped": [layers[last].mlp, *(layer.mlp for layer in attention)],
        "tail_replay, mixers alone": [layer.mlp for layer in layers],
    }
    projections = {name: ["self_attn"] for name in skipped} | {"resident_kv": ["self_attn.k_proj", "self_attn.v_proj"]}
    pairs = spec.attention_flops_per_pair
    for name, modules in skipped.items():
        modules += [block for layer in attention for block in _submodules(layer, *projections[name])]
        attention_pairs = pairs // len(attention) if name == "resident_kv" else pairs
        left_out = 2 * sum(map(_matrices, modules)) + attention_pairs
        assert price(spec, 0, 1).shares[name] == pytest.approx(1 - left_out / spec.prefill_flops(0, 1))


def _submodules(layer: nn.Module, *names: str) -> list[nn.Module]:
    return [layer.get_submodule(name) for name in names]


def _matrices(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
