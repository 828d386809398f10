"""The self-check finds structural faults in every precision, and accepts rounding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from spanlab.engine import oracle
from spanlab.engine.load import named_config, wrap
from spanlab.engine.model import SpanModel
from spanlab.engine.oracle import causal_attend, check_model, distance, eager_twin, in_float32

from ..support.shared import MODELS, needs
from .factories import FAMILIES, SMALL, family_config, make_slow_hybrid
from .llama2c import read_model

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)
HALF = PRECISIONS[1:]
LLAMA = AutoConfig.for_model("llama", **SMALL)


def draw(config: PreTrainedConfig, dtype: torch.dtype, gain: float = 1.0) -> PreTrainedModel:
    """A model with random weights, those of decoder layers `gain` times as large."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.base_model.layers.parameters():
            if weight.dim() > 1:
                weight.mul_(gain)
    return model.to(dtype)


CHECKPOINTS = {
    "stories260K": MODELS / "stories260K" / "stories260K.bin",
    "babyllama": MODELS / "babyllama-tok105" / "model5000.bin",
}


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("name", CHECKPOINTS)
@needs(MODELS)
def test_trained_models_pass_in_every_precision(name, dtype):
    assert wrap(name, read_model(CHECKPOINTS[name]).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_every_precision(family, dtype):
    assert wrap(family, draw(family_config(family), dtype)).dtype == dtype


def test_a_model_that_amplifies_rounding_passes():
    # Special tokens do this in trained models: two right forwards in bfloat16 then differ by more than 5 %.
    deep = AutoConfig.for_model("llama", **SMALL | {"num_hidden_layers": 8})
    model = wrap("loud", draw(deep, torch.bfloat16, gain=4.0))
    ids = torch.arange(24)
    ours = model.forward(ids, ids, causal_attend(model), ids)
    with torch.no_grad():
        theirs = eager_twin(model)(input_ids=ids[None]).logits[0]
    assert distance(ours, theirs) > 5e-2


def test_a_model_that_overflows_in_float16_is_refused():
    with pytest.raises(ValueError, match=r"^model\.name is 'vast', expected finite logits in float16; transformers'"):
        wrap("vast", draw(LLAMA, torch.float16, gain=1e3))


# -- faults of structure ----------------------------------------------------------------------------------------------


@contextmanager
def attention(change: Callable[[SpanModel, int], dict[str, Any]]) -> Iterator[None]:
    """Run the self-check with another attention; `change` gives arguments of torch's attention by layer."""

    def changed(model: SpanModel) -> Callable[..., torch.Tensor]:
        def attend(layer: int, *states: torch.Tensor) -> torch.Tensor:
            query, key, value = (each.transpose(0, 1)[None] for each in states)
            given = {"is_causal": True, "scale": model.scales[layer]} | change(model, layer)
            return scaled_dot_product_attention(query, key, value, enable_gqa=True, **given)[0].transpose(0, 1)

        return attend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "causal_attend", changed)
        yield


def test_the_tests_attention_passes_without_a_fault():
    with attention(lambda model, layer: {}):
        wrap("sound", draw(LLAMA, torch.bfloat16))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_wrong_scale_in_one_layer_is_found(dtype):
    def change(model: SpanModel, layer: int) -> dict[str, Any]:
        return {"scale": model.scales[layer] * (1.02 if layer == 2 else 1)}

    with attention(change), pytest.raises(ValueError, match="expected causal attention over scaled products"):
        wrap("scaled", draw(LLAMA, dtype))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_missing_row_of_attention_is_found(dtype):
    def change(model: SpanModel, layer: int) -> dict[str, Any]:
        mask = torch.ones(oracle._TOKENS, oracle._TOKENS, dtype=torch.bool).tril()
        mask[-1, 0] = layer != 1
        return {"is_causal": False, "attn_mask": mask}

    with attention(change), pytest.raises(ValueError, match="expected causal attention over scaled products"):
        wrap("short-sighted", draw(LLAMA, dtype))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_window_in_one_layer_of_the_model_is_found(dtype):
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    sizes = {key: value for key, value in SMALL.items() if key != "head_dim"}
    windows = {"use_sliding_window": True, "sliding_window": 40, "layer_types": kinds}
    config = AutoConfig.for_model("qwen2", **sizes | windows)
    with pytest.raises(ValueError, match="expected causal attention over scaled products"):
        wrap("windowed", draw(config, dtype))


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_one_layer_with_slower_rotation_is_found(dtype):
    model = draw(LLAMA, dtype)

    def slow(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        slower = model.model.rotary_emb(args[0], kwargs["position_ids"] * 0.998)
        return args, kwargs | {"position_embeddings": slower}

    model.model.layers[2].register_forward_pre_hook(slow, with_kwargs=True)
    with pytest.raises(ValueError, match="layer 2 rotates its queries or keys differently"):
        wrap("slow", model)


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_a_recurrent_layer_that_decays_faster_is_found(dtype, monkeypatch):
    model = deepcopy(make_slow_hybrid().hf)  # with fast decay, a state does not reach far

    def faster(model: SpanModel) -> PreTrainedModel:
        twin = eager_twin(model)
        mixer = twin.base_model.layers[1].linear_attn.mixer
        mixer.dt_bias = torch.nn.Parameter(mixer.dt_bias + 0.5, requires_grad=False)
        return twin

    monkeypatch.setattr(oracle, "eager_twin", faster)
    with pytest.raises(ValueError, match="recurrent layers that go on from a stored state"):
        check_model("fading", model.to(dtype))


# -- float32 for a while ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_forward_in_float32_equals_the_converted_models(dtype):
    model, ids = draw(named_config("tiny-hybrid"), dtype), torch.arange(70)[None]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with torch.no_grad():
        with in_float32(model):
            widened = model(input_ids=ids).logits
        assert {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])} == set()
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        assert torch.equal(widened, model.float()(input_ids=ids).logits)


def test_weights_are_restored_after_a_forward_that_failed():
    model = draw(LLAMA, torch.bfloat16)
    model.model.layers[1].mlp.forward = None
    with pytest.raises(TypeError), in_float32(model):
        model(input_ids=torch.arange(3)[None])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert not model.model.layers[0]._forward_pre_hooks
