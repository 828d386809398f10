"""A packaged model is verified against its pinned checksum, and converted to a folder once."""

import hashlib
import threading
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spanlab import model_files
from spanlab.cli import compose, needed_environment
from spanlab.engine import load
from spanlab.engine.load import load_model
from spanlab.engine.settings import EngineSettings
from spanlab.model_files import MODELS, PackagedModel, cache_folder, find_spec, is_ready, packaged_folder
from spanlab.queries import load_tokenizer

from .gguf_file import CONFIG, TEMPLATE, random_llama, write_gguf

STUDY = ["engine.weights=package", "model=smollm2-135m", "arms=attention", "load.rates_rps=[]", "load.arms=[]"]


@pytest.fixture(scope="module")
def llama():
    return random_llama()


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("SPANLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(monkeypatch, tmp_path, cache):
    """Locate packages in a folder of this test, and register the tiny model as one of them."""

    class Installed:
        def locate_file(self, file: str) -> Path:
            return tmp_path / "site" / file

    def find_distribution(name: str) -> Installed:
        if not (tmp_path / "site" / name).is_dir():
            raise PackageNotFoundError(name)
        return Installed()

    def install(write) -> PackagedModel:
        file = tmp_path / "site" / "tiny_package" / "tiny.gguf"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        model = PackagedModel("toy", "tiny_package", "1.0", "tiny_package/tiny.gguf", sha256, "ours", "ours")
        monkeypatch.setitem(MODELS, "toy", model)
        return model

    monkeypatch.setattr(model_files, "distribution", find_distribution)
    return install


def test_converted_model_computes_the_same_logits(install, llama):
    folder = packaged_folder(install(lambda file: write_gguf(llama, file)))
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(CONFIG.vocab_size, (1, 40), generator=torch.Generator().manual_seed(1))
    assert converted.config.rope_parameters["rope_theta"] == 10000.0
    torch.testing.assert_close(converted(ids).logits, llama(ids).logits, rtol=1e-5, atol=1e-5)


def test_converted_tokenizer_writes_the_same_chat(install, llama):
    tokenizer = load_tokenizer(packaged_folder(install(lambda file: write_gguf(llama, file))))
    assert tokenizer.chat_template == TEMPLATE
    text = tokenizer.template.apply([("user", "Süß?")], open_turn=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.name, tokenizer.bos_token, tokenizer.eos_token) == ("toy", "<|im_start|>", "<|im_end|>")


def test_engine_runs_the_packaged_weights(install, llama):
    folder = packaged_folder(install(lambda file: write_gguf(llama, file)))
    spec = replace(find_spec(str(folder)), weight_itemsize=4, kv_itemsize=4)
    model = load_model(EngineSettings(weights="package", device="cpu"), spec)
    assert torch.equal(model.hf.model.norm.weight, llama.model.norm.weight)
    with pytest.raises(ValueError, match=r"^engine.name=tiny: expected one of .*smollm2-135m"):
        load_model(EngineSettings(name="tiny", weights="package", device="cpu"), spec)


def test_another_file_than_the_pinned_one_is_refused(install, tmp_path):
    model = install(lambda file: file.write_bytes(b"one"))
    file = tmp_path / "site" / model.file
    file.write_bytes(b"other")
    checksum = hashlib.sha256(b"other").hexdigest()
    with pytest.raises(ValueError, match=f"^toy: {file} has sha256 {checksum}; expected {model.sha256}$"):
        packaged_folder(model)
    assert not is_ready(model)


def test_a_missing_package_is_one_sentence(cache):
    missing = replace(MODELS["smollm2-135m"], distribution="no-such-package")
    assert not missing.is_installed
    with pytest.raises(
        ValueError, match=r"^smollm2-135m: the package no-such-package 0.1.2 is not installed; expected"
    ):
        packaged_folder(missing)


def test_a_folder_that_is_ready_is_not_made_again(install, monkeypatch):
    converted = []
    monkeypatch.setattr(
        load, "convert", lambda file, folder: converted.append((folder / "config.json").write_text("{}"))
    )
    model = install(lambda file: file.write_bytes(b"x"))
    assert [packaged_folder(model) for _ in range(2)] == [cache_folder() / "models" / model.sha256[:16] / "toy"] * 2
    assert len(converted) == 1


def test_a_failed_conversion_leaves_nothing(install, monkeypatch, cache):
    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise RuntimeError("half-way")

    monkeypatch.setattr(load, "convert", fail)
    with pytest.raises(RuntimeError, match="half-way"):
        packaged_folder(install(lambda file: file.write_bytes(b"x")))
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_two_conversions_at_once_leave_one_folder(install, monkeypatch):
    together = threading.Barrier(2, timeout=30)

    def convert(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        together.wait()

    monkeypatch.setattr(load, "convert", convert)
    model, folders = install(lambda file: file.write_bytes(b"x")), []
    threads = [threading.Thread(target=lambda: folders.append(packaged_folder(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert [path.name for path in folders[0].parent.iterdir()] == ["toy"]
    assert (folders[0] / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({"SPANLAB_CACHE": "/a"}, "/a"), ({"XDG_CACHE_HOME": "/b"}, "/b/spanlab"), ({"HOME": "/c"}, "/c/.cache/spanlab")],
)
def test_the_cache_folder_is_the_users(monkeypatch, variables, folder):
    for name in ("SPANLAB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_packaged_weights_bring_their_tokenizer(cache):
    study = compose("smoke", [*STUDY, "workload=questions", "workload.questions.requests=null"])
    assert study.workload.tokenizer == "smollm2-135m"
    assert compose("smoke", [*STUDY, "workload=synthetic", "workload.documents=null"]).workload.tokenizer is None


def test_packaged_weights_of_another_model_are_refused(cache):
    with pytest.raises(ValueError, match=r"engine.weights=package with model=tiny: expected one of .*smollm2-135m"):
        compose("smoke", [*STUDY, "model=tiny"])


@pytest.mark.parametrize("needs", [["workload.tokenizer=smollm2-135m"], ["workload.questions.retrieval=dense"], STUDY])
def test_packaged_models_need_the_environment_answers(cache, monkeypatch, needs):
    monkeypatch.setattr(model_files, "distribution", lambda name: (_ for _ in ()).throw(PackageNotFoundError(name)))
    settings = ["workload=questions", "workload.questions.requests=null"]
    assert needed_environment(compose("smoke", settings)) is None
    assert needed_environment(compose("smoke", [*settings, *needs])) == "answers"


@pytest.mark.slow
def test_smollm2_of_the_package_names_its_capital(cache):
    model = MODELS["smollm2-135m"]
    if not model.is_installed:
        pytest.skip(f"needs the package {model.distribution}")
    folder = packaged_folder(model)
    tokenizer = load_tokenizer(folder)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    question = tokenizer.template.apply([("user", "What is the capital of France?")], open_turn=True)
    prompt = tokenizer.encode(question + "The capital is")
    (likeliest,) = weights(torch.tensor(prompt, dtype=torch.int64)[None]).logits[:, -1].argmax(-1)
    assert tokenizer.decode(likeliest.numpy()[None]) == " Paris"
