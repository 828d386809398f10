"""A model that can be had is had the same each time; one that cannot is one clear sentence."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
import yaml

from spanlab.engine.builtin import BUILTIN
from spanlab.engine.load import ModelChoice, load_model, read_config
from spanlab.engine.model import SpanModel, spec_of
from spanlab.engine.oracle import causal_attend
from spanlab.model_spec import ModelSpec

SHAPES = Path(__file__).parents[2] / "conf" / "model"


def logits_of(model: SpanModel) -> torch.Tensor:
    """What a model says of a few tokens."""
    rows = torch.arange(9)
    return model.forward(rows + 5, rows, causal_attend(model), rows)


@pytest.fixture
def saved(make_model, tmp_path: Path) -> Path:
    """A folder that transformers would load from."""
    make_model("tiny").hf.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_random_weights_are_a_function_of_the_seed_and_leave_torchs_own_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (load_model(ModelChoice("tiny", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(logits_of(first), logits_of(same))
    assert not torch.allclose(logits_of(first), logits_of(other), atol=0.1)


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "qwen3.5-0.8b-group", "qwen3.5-27b-group"]
)
def test_published_shapes_are_those_of_the_simulator(name):
    fields = yaml.safe_load((SHAPES / f"{name}.yaml").read_text())
    fields.pop("defaults")
    assert spec_of(name, read_config(ModelChoice(name)), 2) == ModelSpec(**fields)


def test_the_toys_of_the_engine_are_those_of_the_simulator(make_model):
    for name in ("tiny", "tiny-hybrid"):
        fields = yaml.safe_load((SHAPES / f"{name}.yaml").read_text())
        fields.pop("defaults")
        assert make_model(name).spec() == ModelSpec(**fields)


def test_qwen25_half_has_the_parameters_it_is_named_for():
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(read_config(ModelChoice("qwen2.5-0.5b")))
    assert sum(weight.numel() for weight in model.parameters()) == 494_032_768


def test_sizes_are_those_of_the_config(make_model):
    model = make_model("tiny")
    assert (model.layers, model.query_heads, model.kv_heads, model.head_dim) == (4, 8, 2, 32)
    assert (model.vocab_size, model.context) == (2048, 65536)
    assert model.spec().kv_bytes_per_token == 4 * 2 * 2 * 32 * 4
    assert model.scales == (32**-0.5,) * 4


def test_overrides_replace_fields():
    model = load_model(ModelChoice("tiny", overrides={"num_hidden_layers": 1, "vocab_size": 99}))
    assert (model.layers, model.vocab_size) == (1, 99)


def test_an_architecture_and_its_fields_are_enough():
    model = load_model(ModelChoice("mine", architecture="qwen3", overrides=BUILTIN["tiny-qwen3"][1]))
    assert torch.equal(logits_of(model), logits_of(load_model(ModelChoice("tiny-qwen3"))))


def test_a_saved_model_says_what_it_said_before(saved, make_model):
    loaded = load_model(ModelChoice("saved", weights="path", path=str(saved)))
    assert torch.equal(logits_of(loaded), logits_of(make_model("tiny")))


def test_overrides_reach_a_saved_model(saved):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    overrides = {"max_position_embeddings": 99, "rope_parameters": rope}
    loaded = load_model(ModelChoice("saved", weights="path", path=str(saved), overrides=overrides))
    assert loaded.context == 99
    assert float(loaded.rotation.frequencies[0]) == 0.5


WRONG = {
    "an unknown name": ({"name": "tinny"}, r"^model\.name is 'tinny' with random weights, expected one of tiny, .*\.$"),
    "an unknown architecture": ({"architecture": "lama"}, r"^model\.architecture is 'lama', expected a model type"),
    "an unknown field": (
        {"overrides": {"hiden_size": 3}},
        r"^model\.overrides\.hiden_size is set for 'tiny', expected",
    ),
    "a field of a wrong type": ({"overrides": {"hidden_size": "wide"}}, r"'hidden_size' expected int, got str .*\.$"),
    "unknown weights": ({"weights": "found"}, r"^model\.weights is 'found', expected one of random, hub, path\.$"),
    "an unknown dtype": ({"dtype": "int8"}, r"^model\.dtype is 'int8', expected one of float32, bfloat16, float16\.$"),
    "an unknown device": ({"device": "abacus"}, r"^engine\.device is 'abacus', expected cpu, cuda or cuda:<number>\.$"),
    "a device that is no place for it": ({"device": "meta"}, r"^engine\.device is 'meta', expected cpu, cuda or"),
    "a device that is not there": (
        {"device": "cuda:97"},
        r"^engine\.device is 'cuda:97', expected one of this machine's",
    ),
    "a path without its kind": (
        {"path": "x"},
        r"^engine\.path is 'x' with weights random, expected it with weights path",
    ),
    "no path": ({"weights": "path"}, r"^engine\.path is None with weights path, expected it with weights path"),
    "a path that is nowhere": (
        {"weights": "path", "path": "no/where"},
        r"^engine\.path is 'no/where', expected a folder",
    ),
    "an architecture beside weights": ({"weights": "hub", "architecture": "llama"}, r"expected it with random weights"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_sentence_that_names_the_key(mistake):
    given, sentence = WRONG[mistake]
    with pytest.raises(ValueError, match=sentence) as told:
        load_model(ModelChoice(**({"name": "tiny"} | given)))
    assert "\n" not in str(told.value)


def test_a_model_of_the_hub_that_cannot_be_had_is_one_sentence(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"^model\.name is 'nobody/nothing' with hub weights, expected a model"
    ) as told:
        load_model(ModelChoice("nobody/nothing", weights="hub"))
    assert "\n" not in str(told.value)


def test_weights_that_are_missing_are_never_made_up(saved):
    with pytest.raises(ValueError, match=r"expected all weights of the model; 9 are missing, first model\.layers\.4\."):
        load_model(ModelChoice("saved", weights="path", path=str(saved), overrides={"num_hidden_layers": 5}))


@pytest.mark.parametrize("left", [0, 1000, 100_000])
def test_weights_cut_short_are_one_sentence(saved, left):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(
        ValueError, match=r"^engine\.path is '.*saved' with path weights, expected a model to load: .*\.$"
    ):
        load_model(ModelChoice("saved", weights="path", path=str(saved)))


def test_a_config_that_is_no_config_is_one_sentence(saved):
    (saved / "config.json").write_text("{")
    with pytest.raises(
        ValueError, match=r"^engine\.path is '.*saved' with path weights, expected a model to load: .*\.$"
    ):
        load_model(ModelChoice("saved", weights="path", path=str(saved)))
