"""What spans cannot be reused in exactly is refused, layer by layer, with the reason."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from spanlab.engine.load import EXACT_ROPES, Verdict, check_support, named_config, random_model, require_exact, wrap
from spanlab.model_files import choices, find_spec

from . import factories
from .factories import make_choice

SMALL = factories.SMALL | {"max_position_embeddings": 4096}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
STRETCHED = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
FULL, WINDOW, RECURRENT = "full_attention", "sliding_attention", "linear_attention"


def make_config(model_type: str, **fields: object) -> PreTrainedConfig:
    """A three-layer config of any type, with those of the small sizes that the type has."""
    config = AutoConfig.for_model(model_type)
    return AutoConfig.for_model(
        model_type, **{key: value for key, value in SMALL.items() if hasattr(config, key)} | fields
    )


def reasons(model_type: str, **fields: object) -> list[str]:
    """Why each layer is refused; empty words where it is not."""
    return [verdict.reason for verdict in check_support(make_config(model_type, **fields))]


#: Choices for the simulator alone: their layers have windows or latents.
SIMULATED = {name for name in choices() if find_spec(name).local or find_spec(name).has_latents}


@pytest.mark.parametrize("name", [name for name in choices() if name not in SIMULATED])
def test_every_choice_of_conf_model_is_exact_in_every_layer(name):
    config = named_config(name)
    assert check_support(config) == tuple(Verdict(layer) for layer in range(config.num_hidden_layers))


@pytest.mark.parametrize("name", sorted(SIMULATED))
def test_choices_for_the_simulator_alone_are_refused(name):
    assert any(verdict.reason for verdict in check_support(named_config(name)))


EXACT = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": STRETCHED}),
    "llama3": (
        "llama",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "yarn": (
        "qwen2",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    ),
    "no window": ("mistral", {"sliding_window": None}),
    "a window as long as the context": ("mistral", {"sliding_window": 4096}),
    "a window that is not used": ("qwen2", {"sliding_window": 16, "use_sliding_window": False}),
    "experts": ("mixtral", {"num_local_experts": 2}),
    "recurrent layers": ("qwen3_next", {"layer_types": [FULL, FULL, RECURRENT], "num_experts": 2}),
    "three positions per token, all the same in text": (
        "qwen3_5_text",
        {"layer_types": [RECURRENT, FULL, FULL], "rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
    ),
}


@pytest.mark.parametrize("kind", EXACT)
def test_exact_kinds_are_let_through(kind):
    model_type, fields = EXACT[kind]
    assert reasons(model_type, **fields) == ["", "", ""]


def test_the_exact_embeddings_are_those_tested():
    assert set(EXACT_ROPES) == {"default", "linear", "llama3", "yarn"}


REFUSED = {
    "dynamic NTK": ("llama", {"rope_parameters": STRETCHED | {"rope_type": "dynamic"}}, "uses dynamic NTK rotary"),
    "LongRoPE": (
        "phi3",
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
                "original_max_position_embeddings": 2048,
            }
        },
        "uses LongRoPE rotary",
    ),
    "unknown": (
        "llama",
        {"rope_parameters": STRETCHED | {"rope_type": "spiral"}},
        "uses the rotary embedding 'spiral'",
    ),
    "by kind of layer": (
        "gemma3_text",
        {"layer_types": [FULL] * 3, "rope_parameters": {FULL: ROPE, WINDOW: STRETCHED}},
        "has a rotary embedding that differs from layer to layer",
    ),
    "learned positions": ("gpt2", {}, "has no rotary position embedding"),
    "window": ("mistral", {"sliding_window": 512}, "attends to a sliding window of 512 tokens only"),
    "capped scores": ("gemma2", {"layer_types": [FULL] * 3}, "caps its attention scores softly"),
    "sinks": (
        "gpt_oss",
        {"layer_types": [FULL] * 3, "rope_parameters": ROPE, "num_local_experts": 2},
        "has attention sinks",
    ),
    "latent": ("deepseek_v3", {}, "keeps latent keys and values (MLA)"),
    "not causal": ("bert", {}, "has no rotary position embedding"),
    "both directions": (
        "gemma3_text",
        {"use_bidirectional_attention": True, "layer_types": [FULL] * 3},
        "later tokens",
    ),
    "an encoder": ("t5", {}, "which is no causal language model of transformers"),
    "its own attention": ("stablelm", {}, "whose attention does not go through transformers' interface"),
    "heads that do not divide": (
        "llama",
        {"num_key_value_heads": 3},
        "has 4 query heads, which is no multiple of its 3",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_kinds_are_refused_in_every_layer_with_the_reason(kind):
    model_type, fields, reason = REFUSED[kind]
    found_reasons = reasons(model_type, **fields)
    assert found_reasons, "no layer was judged"
    assert all(reason in each for each in found_reasons)


MIXED = {
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": [FULL, WINDOW, FULL]},
        1,
        "of 64",
    ),
    "chunks": (
        "llama",
        {"layer_types": [FULL, FULL, "chunked_attention"]},
        2,
        "attention of the kind 'chunked_attention'",
    ),
    "unrotated": ("smollm3", {"no_rope_layers": [0, 1, 1]}, 0, "does not rotate, unlike other layers"),
    "recurrent": (
        "lfm2",
        {"layer_types": [FULL, FULL, "conv"]},
        2,
        "is recurrent (conv) in a way whose state is not one of GatedDeltaNet",
    ),
}


@pytest.mark.parametrize("kind", MIXED)
def test_an_inexact_layer_is_detected(kind):
    model_type, fields, layer, reason = MIXED[kind]
    found_reasons = reasons(model_type, **fields)
    assert reason in found_reasons[layer]
    assert not any(reason in found_reasons[other] for other in range(3) if other != layer)


def test_the_refusal_names_model_layers_and_reason_in_one_sentence():
    verdicts = [Verdict(0), Verdict(1, "caps its scores"), Verdict(2), Verdict(3, "caps its scores")]
    with pytest.raises(ValueError, match=r"^model\.name is 'x', expected .*: in layer 1, 3 it caps its scores\.$"):
        require_exact("x", verdicts)
    with pytest.raises(ValueError, match=r"in every layer it caps its scores\.$"):
        require_exact("x", [Verdict(0, "caps its scores")])
    require_exact("x", [Verdict(0), Verdict(1)])


@pytest.mark.parametrize("kind", ["dynamic NTK", "window"])
def test_a_refused_model_is_never_loaded(kind):
    model_type, fields, reason = REFUSED[kind]
    with pytest.raises(ValueError, match=reason.partition(" (")[0]):
        random_model("mine", AutoConfig.for_model(model_type, **SMALL | fields))


# What no setting tells, a few tokens do.
HIDDEN = {
    "queries grow with position": (
        "ministral3",
        {
            "layer_types": [FULL] * 3,
            "sliding_window": None,
            "max_position_embeddings": 65536,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16384,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "layer 0 rotates its queries or keys differently",
    ),
    "rotated backwards": ("nanochat", {}, "layer 0 rotates its queries or keys differently"),
    "two attentions per layer": ("diffllama", {}, "expected one attention per layer"),
    "masks of its own": ("doge", {}, "builds masks of its own"),
    "arguments kept back": ("nemotron", {}, "keeps arguments from them"),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_undeclared_properties_are_found_on_a_few_tokens(kind):
    model_type, fields, reason = HIDDEN[kind]
    assert reasons(model_type, **fields) == ["", "", ""], "the support check knows it already"
    with pytest.raises(ValueError, match=reason):
        random_model("mine", make_config(model_type, **fields))


def test_a_rotation_that_is_not_the_modules_is_found():
    # The self-check compares with the frequencies that we read, so a module that uses others must not pass.
    model = make_choice("tiny").hf
    apply = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: apply(x, position_ids * 1.01)
    with pytest.raises(ValueError, match="rotates its queries or keys differently"):
        wrap("skewed", model)


def test_a_softmax_with_further_terms_is_detected():
    model_type, fields, _ = REFUSED["sinks"]
    model = AutoModelForCausalLM.from_config(make_config(model_type, **fields, num_experts_per_tok=2))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(1.0)
    with pytest.raises(
        ValueError, match=r"^model\.name is 'sunk', expected causal attention .* nothing else; its logits"
    ):
        wrap("sunk", model)
