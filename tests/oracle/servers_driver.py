"""Sends the cases of `sequence_prompts` to a running llama-server or mistral.rs, and stores what each reports.

usage: PYTHON servers_driver.py llama_cpp LLAMA_SERVER MODEL.gguf FIRST STOP OUT.json
       PYTHON servers_driver.py mistralrs - MODEL_FOLDER FIRST STOP OUT.json

The second form needs the package `mistralrs`; the first one needs the standard library. Answers are forced by a bias on
one token, so that a case knows them in advance.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from sequence_prompts import WORDS, sequences_case, slots_case

BIAS = 1000.0
FIRST_ID = 100  # of llama.cpp's vocabulary; ids below are special


class LlamaServer:
    """One llama-server with the settings of a case."""

    def __init__(self, binary: str, model: str, case: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = {
            "--model": model,
            "--host": "127.0.0.1",
            "--port": self.port,
            "--ctx-size": case["cells"],
            "--parallel": case["slots"],
            "--slot-prompt-similarity": case["similarity"],
            "--cache-reuse": case["chunk"],
            "--cache-ram": case["host_mib"],
            "--threads": 1,
            "--threads-batch": 1,
        }
        flags = [f"--{'' if case['unified'] else 'no-'}kv-unified"]
        flags.append(f"--{'' if case['idle_to_host'] else 'no-'}cache-idle-slots")
        command = [binary, *flags, *(str(word) for pair in arguments.items() for word in pair)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.slots = case["slots"]

    def __enter__(self) -> LlamaServer:
        while True:
            assert self.process.poll() is None, "llama-server has stopped"
            try:
                connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def ask(self, request: dict[str, Any], started: Event, begins: Any) -> dict[str, Any]:
        """Send one request; `begins` is called at its first token."""
        body = {
            "prompt": [FIRST_ID + word for word in request["prompt"]],
            "n_predict": request["output"],
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "return_tokens": True,
            "logit_bias": [[FIRST_ID + request["answer"], BIAS]],
        }
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        tokens: list[int] = []
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
        for line in reply:
            if not line.startswith(b"data:"):
                continue
            part = json.loads(line[5:])
            if not started.is_set():
                begins()
                started.set()
            tokens += part["tokens"]
            if part["stop"]:
                assert tokens == [FIRST_ID + request["answer"]] * request["output"], "the answer is another one"
                return {"reused": part["timings"]["cache_n"], "slot": part["id_slot"]}
        raise AssertionError("the stream ended early")


def run_slots(server: LlamaServer, waves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Send waves: each request of a wave after the one before it has begun, or waits because no slot is idle."""
    results: list[dict[str, Any]] = []
    events: list[str] = []
    with ThreadPoolExecutor(8) as pool:
        for wave in waves:
            jobs = []
            for request in wave:
                number, started = len(results) + len(jobs), Event()

                def work(request: dict[str, Any], number: int, started: Event) -> dict[str, Any]:
                    result = server.ask(request, started, lambda: events.append(f"+{number}"))
                    events.append(f"-{number}")
                    return result

                jobs.append(pool.submit(work, request, number, started))
                if len(jobs) <= server.slots:
                    started.wait()
                else:
                    time.sleep(0.2)  # it is in the queue
            results += [job.result() for job in jobs]
    return {
        "reused": [result["reused"] for result in results],
        "slots": [result["slot"] for result in results],
        "events": " ".join(events),
    }


class MistralRs:
    """mistral.rs in this process; each word is one token of its vocabulary, and a prompt is a text of words."""

    def __init__(self, model: str) -> None:
        vocabulary = json.loads((Path(model) / "tokenizer.json").read_text())["model"]["vocab"]
        words = sorted((number, word) for word, number in vocabulary.items() if re.fullmatch("Ġ[a-z]{2,}", word))
        self.ids = [number for number, _ in words[:WORDS]]
        self.texts = [word.replace("Ġ", " ") for _, word in words[:WORDS]]
        assert len(self.ids) == WORDS, "the vocabulary has too few words"
        self.model = model

    def run(self, waves: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Send all requests of a case, one after another, to a new server."""
        from mistralrs import Architecture, CompletionRequest, Runner, Which

        runner = Runner(which=Which.Plain(model_id=self.model, arch=Architecture.Llama), prefix_cache_n=2)
        reused = []
        for request in [request for wave in waves for request in wave]:
            text = "".join(self.texts[word] for word in request["prompt"])
            assert runner.tokenize_text(text, False, False) == [self.ids[word] for word in request["prompt"]]
            reply = runner.send_completion_request(
                CompletionRequest(
                    prompt=text,
                    model="default",
                    max_tokens=request["output"],
                    temperature=0.0,
                    ignore_eos=True,
                    logit_bias={self.ids[request["answer"]]: BIAS},
                )
            )
            assert reply.choices[0].text == self.texts[request["answer"]] * request["output"]
            assert reply.usage.prompt_tokens == len(request["prompt"])
            details = reply.usage.prompt_tokens_details
            reused.append(0 if details is None else details.cached_tokens)
        return {"reused": reused}


def results(name: str, binary: str, model: str, seeds: range) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each case with what the server reports."""
    if name == "mistralrs":
        server = MistralRs(model)
        yield from ((seed, server.run(sequences_case(seed)["waves"])) for seed in seeds)
        return
    for seed in seeds:
        case = slots_case(seed)
        with LlamaServer(binary, model, case) as running:
            yield seed, run_slots(running, case["waves"])


if __name__ == "__main__":
    name, binary, model, first, stop, out = sys.argv[1:]
    reported = {}
    for seed, result in results(name, binary, model, range(int(first), int(stop))):
        reported[str(seed)] = result
        Path(out).write_text(json.dumps(reported))  # after each case, so that a long run can be stopped
