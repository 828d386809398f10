"""A model that can be had is had the same each time; one that cannot is one clear sentence."""

from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.utils
import orjson
import pytest
import torch
from transformers.utils import logging

from spanlab.build import build_model
from spanlab.cli import compose
from spanlab.engine.load import load_model, named_config, read_config, wrap
from spanlab.engine.model import SpanModel, spec_of
from spanlab.engine.oracle import causal_attend, causal_mask, dense_logits, eager_twin
from spanlab.engine.settings import EngineSettings
from spanlab.model_files import choices, find_spec
from spanlab.model_spec import ModelSpec

from ..support.shared import MODELS, needs
from .llama2c import read_model, read_pieces


def logits_of(model: SpanModel) -> torch.Tensor:
    """A model's logits of a few tokens."""
    rows = torch.arange(9)
    return model.forward(rows + 5, rows, causal_attend(model), rows)


def load(spec: ModelSpec | str = "tiny", **given: object) -> SpanModel:
    """A model by settings, on the CPU unless they say otherwise."""
    spec = find_spec(spec) if isinstance(spec, str) else spec
    return load_model(EngineSettings(**{"device": "cpu"} | given), spec)


@pytest.fixture
def saved(make_model, tmp_path: Path) -> Path:
    """A folder that transformers would load from."""
    make_model("tiny").hf.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def change(folder: Path, **keys: object) -> None:
    """Change keys of a saved model's config.json."""
    file = folder / "config.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | keys))


def test_random_weights_depend_only_on_the_seed():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (load(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(logits_of(first), logits_of(same))
    assert not torch.allclose(logits_of(first), logits_of(other), atol=0.1)


@pytest.mark.parametrize(
    "name", [name for name in choices() if not (find_spec(name).local or find_spec(name).has_latents)]
)
def test_the_engine_counts_as_the_simulator_does(name):
    spec = find_spec(name)
    in_float32 = replace(
        spec, state_itemsize=4
    )  # vLLM keeps states of Qwen3-Next in bfloat16, the engine all in float32
    dtype = getattr(torch, {2: "bfloat16", 4: "float32"}[spec.weight_itemsize])
    assert spec_of(name, named_config(name), dtype) == (in_float32 if spec.is_hybrid else spec)


def test_qwen25_half_has_the_parameters_it_is_named_for():
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(named_config("qwen2.5-0.5b"))
    assert sum(weight.numel() for weight in model.parameters()) == 494_032_768


def test_sizes_are_those_of_the_config(make_model):
    model = make_model("tiny")
    assert (model.layers, model.query_heads, model.kv_heads, model.head_dim) == (4, 8, 2, 32)
    assert (model.vocab_size, model.context) == (2048, 65536)
    assert spec_of(model.name, model.config, model.dtype).kv_bytes_per_token == 4 * 2 * 2 * 32 * 4
    assert model.scales == (32**-0.5,) * 4


def test_weights_are_in_the_type_of_the_sizes():
    assert load().dtype == torch.float32
    half = load(ModelSpec(**vars(find_spec("tiny")) | {"weight_itemsize": 2, "kv_itemsize": 2}))
    assert half.dtype == torch.bfloat16


def test_random_weights_of_any_config_file(saved, make_model):
    model = load(find_spec(str(saved)), name=str(saved))
    assert torch.equal(logits_of(model), logits_of(make_model("tiny")))


def test_a_saved_model_keeps_its_outputs(saved, make_model):
    loaded = load(find_spec(str(saved)), weights="path", path=str(saved))
    assert torch.equal(logits_of(loaded), logits_of(make_model("tiny")))


def test_a_model_of_the_hub_is_named_by_the_study(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)  # where transformers takes the folder for the repository of that name
    spec = ModelSpec(**vars(find_spec("tiny")) | {"name": "saved"})
    assert load(spec, weights="hub").context == 65536


def test_other_settings_of_a_saved_model_are_kept(saved):
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    change(saved, max_position_embeddings=99, rope_parameters=rope)
    loaded = load(weights="path", path=str(saved))
    assert loaded.context == 99
    assert float(loaded.rotation.frequencies[0]) == 0.5


WRONG = {
    "an unknown name": ({"name": "tinny"}, r"^engine\.name=tinny: there is no tinny; expected a choice of conf/model"),
    "a device that is none": (
        {"device": "abacus"},
        r"^engine\.device is 'abacus', expected cpu, cuda or cuda:<number>",
    ),
    "a device that is no place for it": ({"device": "meta"}, r"^engine\.device is 'meta', expected cpu, cuda or"),
    "a device that is not there": (
        {"device": "cuda:97"},
        r"^engine\.device is 'cuda:97', expected one of this machine's",
    ),
    "unknown weights": ({"weights": "found"}, r"^engine\.weights=found: expected one of random, hub, path"),
    "a path without its kind": ({"path": "x"}, r"^engine\.path=x with engine\.weights=random: expected both or"),
    "no path": ({"weights": "path"}, r"^engine\.path=None with engine\.weights=path: expected both or"),
    "a path that is nowhere": ({"weights": "path", "path": "no/where"}, r"^engine\.path=no/where: expected a folder"),
    "no model of the hub": (
        {"name": "nobody/nothing", "weights": "hub"},
        r"^engine\.name=nobody/nothing with engine\.weights=hub: expected a model",
    ),
    "numbers of one byte": (
        {"spec": ModelSpec(**vars(find_spec("tiny")) | {"weight_itemsize": 1})},
        r"^model\.weight_itemsize=1: expected 2 or 4",
    ),
    "other sizes": ({"name": "tiny-hybrid"}, r"^model\.attention_layers=4: tiny-hybrid has 1; expected the sizes of"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_one_sentence_that_names_the_key(mistake, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    given, sentence = WRONG[mistake]
    with pytest.raises(ValueError, match=sentence) as error:
        load(**given)
    assert "\n" not in str(error.value)


def test_a_file_of_another_type_is_one_sentence(saved):
    change(saved, model_type="lama")
    with pytest.raises(ValueError, match=r"^engine\.name=.*: its model_type is lama; expected one of transformers"):
        load(name=str(saved))


def test_a_field_of_a_wrong_type_is_one_sentence(saved):
    change(saved, hidden_size="wide")
    with pytest.raises(ValueError, match=r"^engine\.name=.* expected a model to load: .*expected int, got str"):
        read_config(EngineSettings(), str(saved))


def test_weights_that_are_missing_are_never_made_up(saved):
    change(saved, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"expected all weights of the model; 9 are missing, first model\.layers\.4\."):
        load(find_spec(str(saved)), weights="path", path=str(saved))


@pytest.mark.parametrize(
    ("name", "left"), [*(("model.safetensors", left) for left in (0, 1000, 100_000)), ("config.json", 1)]
)
def test_files_cut_short_are_one_sentence(saved, name, left):
    file = saved / name
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(
        ValueError, match=r"^engine\.path=.*saved with engine\.weights=path: expected a model to load: "
    ):
        load(weights="path", path=str(saved))


@needs(MODELS)
def test_a_study_runs_a_folder_of_trained_weights(tmp_path):
    hf = read_model(MODELS / "stories260K" / "stories260K.bin")
    hf.save_pretrained(tmp_path)
    folder = ("backend=engine", "engine.weights=path", f"engine.path={tmp_path}", "engine.device=cpu")
    model = build_model(compose("pic_agreement", [f"model={tmp_path}", *folder]))
    assert torch.equal(logits_of(model), logits_of(wrap("trained", hf)))
    with pytest.raises(ValueError, match=r"^model\..*=.*: .* has .*; expected the sizes of the model that the engine"):
        build_model(compose("pic_agreement", ["model=tiny", *folder]))


def test_stored_layout_changes_no_weight(make_model):
    """Decoder layers lie by input in memory, and mean the same; the head and the embeddings lie as they did."""
    model = make_model("tiny")
    weight = model.hf.model.layers[0].mlp.up_proj.weight
    assert (weight.stride(), model.hf.lm_head.weight.is_contiguous()) == ((1, weight.shape[0]), True)
    rows = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.hf.model.layers[0].mlp.up_proj(rows), rows @ weight.contiguous().T)


def test_loading_prints_no_bar(saved: Path, capfd: pytest.CaptureFixture[str]):
    assert logging.is_progress_bar_enabled()
    load(weights="path", path=str(saved))
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled()
    assert not huggingface_hub.utils.are_progress_bars_disabled()


# -- Trained weights give their trained outputs with our attention. ---


OPENING = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


def continue_greedily(model: SpanModel, ids: list[int], count: int) -> list[int]:
    """`count` more tokens, each the likeliest, with full recompute for each."""
    for _ in range(count):
        rows = torch.arange(len(ids))
        logits = model.forward(torch.tensor(ids), rows, causal_attend(model), rows[-1:])
        ids = [*ids, int(logits.argmax())]
    return ids


def test_word_pieces_tell_the_story_they_are_known_for(stories):
    pieces = read_pieces(MODELS / "stories260K" / "tok512.bin")
    ids = continue_greedily(stories, [1], 60)
    assert "".join(pieces[number] for number in ids[1:]).strip().startswith(OPENING)


def test_trained_logits_equal_eager_attention(stories):
    ids = torch.randint(3, stories.vocab_size, (200,), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(200)
    ours = stories.forward(ids, rows, causal_attend(stories), rows)
    truth = dense_logits(eager_twin(stories), ids, causal_mask(200), rows)
    assert (ours - truth).norm() < 1e-5 * truth.norm()
