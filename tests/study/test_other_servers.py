"""Servers that a study starts: their commands, our server over mistral.rs, and models in llama.cpp's format.

No server of others runs here: `mistralrs` is a module of this test, which reuses common prefixes.
"""

import importlib.util
import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import gguf
import httpx
import numpy as np
import pytest

from spanlab.cli import compose
from spanlab.core.request import Request, Span
from spanlab.study.servers import base
from spanlab.study.servers.base import LlamaCpp, MistralRs, as_served

SERVERS = Path(base.__file__).parent
FAKE = """
from types import SimpleNamespace as Object

class Which:
    Plain = Object

class ChatCompletionRequest(Object):
    pass

class Runner:
    def __init__(self, which, **rules):
        self.rules, self.stored = rules, []

    def send_chat_completion_request(self, request):
        words = request.messages[0]["content"].split()
        if words[0] == "t9":
            raise ValueError("nine is refused")
        common = max([sum(1 for _ in iter_common(words, other)) for other in self.stored], default=0)
        self.stored.append(words)
        details = Object(cached_tokens=common) if common else None
        for number in range(request.max_tokens):
            last = number == request.max_tokens - 1
            usage = Object(prompt_tokens=len(words), completion_tokens=number + 1, total_tokens=0,
                           prompt_tokens_details=details) if last else None
            choice = Object(delta=Object(content=f"t{number}"), finish_reason="length" if last else None)
            yield Object(id="1", choices=[choice], usage=usage)

def iter_common(words, other):
    for pair in zip(words, other):
        if pair[0] != pair[1]:
            return
        yield pair
"""


def study_of(arm: str, engine: str, *overrides: str):
    chosen = [f"only=[{arm}]", f"baseline={arm}", "arms=presets", "model=tiny", f"server.engine={engine}"]
    return compose("rendezvous", [*chosen, *overrides])


def launch_of(study, folder: Path, longest: int = 1000) -> base.Launch:
    return base.Launch(study, folder, 4321, longest)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """The folder of a model with two layers, whose weights are numbers in order."""
    folder = tmp_path / "weights"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 20, "hidden_size": 8, "intermediate_size": 12}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config |= {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "eos_token_id": 2}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (20, 8), "model.norm": (8,), "lm_head": (20, 8)}
    for layer in range(2):
        parts = {"self_attn.q_proj": (16, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8)}
        parts |= {"self_attn.o_proj": (8, 16), "input_layernorm": (8,), "post_attention_layernorm": (8,)}
        parts |= {"mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    header, content = {}, b""
    for name, shape in shapes.items():
        values = np.arange(np.prod(shape), dtype=np.float16).tobytes()
        span = [len(content), len(content) + len(values)]
        header[f"{name}.weight"] = {"dtype": "F16", "shape": list(shape), "data_offsets": span}
        content += values
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + content)
    return folder


# -- commands ----------------------------------------------------------------------------------------------------------


def test_llama_cpp_gets_the_rules_of_its_arm(tmp_path: Path, weights: Path):
    options = ["options.cache_reuse=32", "options.kv_unified=false", "options.cache_ram_gib=0.5"]
    overrides = [f"arms.llama_cpp.{option}" for option in options]
    study = study_of("llama_cpp", "llama_cpp", "engine.weights=path", f"engine.path={weights}", *overrides)
    kind = LlamaCpp()
    kind.check(study)
    command = kind.command(launch_of(study, tmp_path))
    pairs = dict(pairwise(command))
    assert command[0] == "python" and str(weights) in command
    assert (pairs["--cache-reuse"], pairs["--cache-ram"], pairs["--parallel"], pairs["--port"]) == (
        "32",
        "512",
        "4",
        "4321",
    )
    assert "--no-kv-unified" in command and "--cache-idle-slots" in command
    assert int(pairs["--ctx-size"]) == 4 * 1024, "each slot takes the longest request"


def test_the_store_is_the_context_of_llama_cpp(tmp_path: Path, weights: Path):
    study = study_of("llama_cpp", "llama_cpp", "engine.weights=path", f"engine.path={weights}", "store=gib_2")
    command = LlamaCpp().command(launch_of(study, tmp_path))
    tokens = int(command[command.index("--ctx-size") + 1])
    assert 0 <= (2 << 30) - tokens * study.model.kv_bytes_per_token < 256 * study.model.kv_bytes_per_token


def test_mistral_rs_gets_the_limit_of_requests(tmp_path: Path, weights: Path):
    unlimited = "arms.mistralrs_0_9.options.prefix_cache_n=null"
    paths = ["engine.weights=path", f"engine.path={weights}"]
    study = study_of("mistralrs_0_9", "mistralrs", unlimited, *paths)
    kind = MistralRs()
    kind.check(study)
    command = kind.command(launch_of(study, tmp_path))
    assert command[command.index("--max-seqs") + 1] == str(study.batch.max_num_seqs)


@pytest.mark.parametrize(
    ("kind", "arm", "engine", "message"),
    [
        (MistralRs, "vllm_0_32", "mistralrs", "expected an arm with policy=sequences"),
        (MistralRs, "mistralrs_0_9", "mistralrs", "prefix_cache_n=16 .* expected null"),
        (LlamaCpp, "lmcache", "llama_cpp", "expected an arm with policy=slots"),
    ],
)
def test_arms_of_another_cache_are_refused(kind, arm, engine, message):
    with pytest.raises(ValueError, match=message):
        kind().check(study_of(arm, engine))


# -- our server over mistral.rs ----------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path, weights: Path):
    """The address of the server, over the module of this test."""
    (tmp_path / "mistralrs.py").write_text(FAKE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-c",
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.argv.pop(0)\n"
        "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')",
    ]
    arguments = [
        str(tmp_path),
        str(SERVERS / "mistralrs_server.py"),
        str(weights),
        "--name",
        "toy",
        "--port",
        str(port),
    ]
    process = subprocess.Popen([*command, *arguments], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ask(address: str, prompt: list[int], **more: object) -> list[dict]:
    body = {"prompt": prompt, "max_tokens": 2, "stream": True, "ignore_eos": True, **more}
    reply = httpx.post(f"{address}/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_completions_are_streamed_with_the_reused_tokens(address):
    assert httpx.get(f"{address}/v1/models").json()["data"] == [{"id": "toy", "object": "model"}]
    first, second = ask(address, [3, 4, 5]), ask(address, [3, 4, 6, 7])
    assert [event["choices"][0]["text"] for event in first] == ["t0", "t1"]
    assert first[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second[-1]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "text", "max_tokens": 1, "stream": True}, "prompt: expected a list of token ids"),
        ({"prompt": [1, 20], "max_tokens": 1, "stream": True}, "prompt: expected token ids from 0 to 19"),
        ({"prompt": [1], "max_tokens": 0, "stream": True}, "max_tokens=0: expected a whole number above zero"),
        ({"prompt": [1], "max_tokens": 1}, "expected a JSON object with stream=true"),
    ],
)
def test_other_bodies_are_refused(address, body, message):
    reply = httpx.post(f"{address}/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


def test_an_error_of_mistral_rs_ends_the_stream(address):
    assert ask(address, [9, 1])[-1]["error"]["message"] == "nine is refused"


# -- models in llama.cpp's format --------------------------------------------------------------------------------------


def load(name: str):
    """A file that runs as a program elsewhere, as a module."""
    spec = importlib.util.spec_from_file_location(name, SERVERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_model_is_written_as_gguf(tmp_path: Path, weights: Path):
    load("llama_server").write(weights, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(tensors) == 3 + 2 * 9
    assert tensors["blk.1.ffn_down.weight"].shape == (8, 12)
    assert tensors["blk.0.attn_norm.weight"].dtype == np.float32
    assert reader.get_field("llama.rope.freq_base").contents() == 500.0
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 20
    keys = tensors["blk.0.attn_k.weight"][:, 0] // 8  # rows of the source, in the order of the target
    assert keys.tolist() == [0, 2, 1, 3, 4, 6, 5, 7], "neighbours rotate together, in each head of four rows"


def test_unknown_models_are_refused_in_one_sentence(tmp_path: Path, weights: Path):
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(SystemExit, match="model_type=mamba: expected one of llama, mistral, qwen2, qwen3"):
        load("llama_server").write(weights, tmp_path / "model.gguf")


# -- the simulation that a server is compared with ---------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "salts"), [("mistralrs", {""}), ("llama_cpp", {""}), ("none", {"a", "b"})])
def test_requests_are_simulated_as_the_server_gets_them(engine, salts):
    address = ["base_url=http://localhost:1"] if engine == "none" else []
    study = study_of("mistralrs_0_9", engine, *address)
    tokens = np.arange(5000, 5010, dtype=np.int32)  # beyond the vocabulary of the model
    given = [Request(number, 0, (Span(tokens),), 3, cache_salt=salt, output=tokens) for number, salt in enumerate("ab")]
    requests = as_served(study, given)
    assert {request.cache_salt for request in requests} == salts
    assert max(request.tokens.max() for request in requests) < study.model.vocab_size
    assert all(request.output is None for request in requests)
