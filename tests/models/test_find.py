"""A model is found by a name of conf/model, by a file, by a folder, or in the cache of the hub's client."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.model_files import CHOICES, find_config, find_spec
from spanlab.model_spec import ModelSpec

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama",
    "torch_dtype": "float16",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config.json."""
    path = tmp_path / "mine"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The empty cache of the hub's client, without access to the hub."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_file_and_its_folder_are_the_same_model(folder: Path):
    spec = find_spec(str(folder))
    assert spec == find_spec(str(folder / "config.json"))
    assert (spec.name, spec.attention_layers, spec.kv_bytes_per_token) == ("mine", 5, 5 * 2 * 4 * 8 * 2)


def test_a_file_of_another_name_names_its_model(folder: Path):
    (folder / "small.json").write_text(json.dumps(LLAMA))
    assert find_spec(str(folder / "small.json")).name == "small"


def test_paths_are_relative_to_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    assert [find_spec(name).name for name in (".", "./config.json", "../mine")] == ["mine"] * 3
    monkeypatch.chdir(folder.parent)
    assert find_spec("mine").name == "mine"


def test_a_repository_is_read_from_the_cache(no_network: Path):
    snapshot = no_network / "models--someone--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA))
    (no_network / "models--someone--small" / "refs").mkdir()
    (no_network / "models--someone--small" / "refs" / "main").write_text("abc")
    spec = find_spec("someone/small")
    assert (spec.name, spec.attention_layers) == ("someone/small", 5)


def test_a_repository_without_network_is_one_sentence(no_network: Path):
    with pytest.raises(ValueError, match=r"^model=someone/small: not in the cache .* expected a config\.json, or a"):
        find_spec("someone/small")


@pytest.mark.parametrize("name", ["no/such/folder", "/no/where", "./nothing", "nothing.json"])
def test_a_path_to_nothing_is_one_sentence(name: str):
    with pytest.raises(ValueError, match=rf"^model={name}: there is no .*; expected a choice of conf/model, a config"):
        find_spec(name)


def test_a_folder_without_a_config_is_one_sentence(tmp_path: Path):
    with pytest.raises(ValueError, match=r"there is no .*config\.json; expected"):
        find_spec(str(tmp_path))


@pytest.mark.parametrize(("text", "sentence"), [("{", "no JSON"), ("[1]", "expected the keys of a config.json")])
def test_a_file_that_is_no_config_is_one_sentence(tmp_path: Path, text: str, sentence: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=sentence) as error:
        find_spec(str(tmp_path))
    assert "\n" not in str(error.value)


def test_a_choice_extends_another():
    group, full = (find_config(name).keys for name in ("qwen3.5-0.8b-group", "qwen3.5-0.8b"))
    assert {key for key in group if group[key] != full[key]} == {"num_hidden_layers", "vocab_size"}


HEADLINES = {path: json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks").rglob("headline.json"))}
PUBLISHED = {str(path.parent.relative_to(ROOT / "benchmarks")): found["sizes"] for path, found in HEADLINES.items()}


@pytest.mark.parametrize("name", [name for name, sizes in PUBLISHED.items() if sizes])
def test_published_runs_had_the_derived_sizes(name: str):
    sizes = PUBLISHED[name]
    widths = {key: sizes[key] for key in ("weight_itemsize", "kv_itemsize")}  # a run on a processor may use float32
    assert ModelSpec(**sizes) == replace(find_spec(sizes["name"]), **widths)


# As a setting.


@pytest.mark.parametrize("suffix", ["", "/config.json"])
def test_a_study_takes_a_path(folder: Path, suffix: str):
    assert compose("pic_sim", [f"model={folder}{suffix}"]).model == find_spec(str(folder))


def test_sizes_of_a_path_can_be_overridden(folder: Path):
    spec = compose("pic_sim", [f"model={folder}", "model.kv_itemsize=1"]).model
    assert 2 * spec.kv_bytes_per_token == find_spec(str(folder)).kv_bytes_per_token


def test_a_folder_of_ones_own_choices_still_counts(tmp_path: Path):
    (tmp_path / "model").mkdir()
    fields = "\n".join(f"{key}: {value}" for key, value in vars(find_spec("tiny")).items() if key != "name")
    (tmp_path / "model" / "mine.yaml").write_text(f"defaults: [base_model, _self_]\nname: mine\n{fields}\n")
    study = compose("pic_sim", ["model=mine"], str(tmp_path))
    assert study.model.name == "mine"
    assert study.model.kv_bytes_per_token == find_spec("tiny").kv_bytes_per_token


def test_the_choices_are_files_of_conf_model():
    assert CHOICES == ROOT / "conf" / "model"


def test_deeply_nested_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(100_000 * "[")
    with pytest.raises(ValueError, match=r"no JSON \(.*\); expected a config\.json"):
        find_config(str(tmp_path))
