"""The systems of the comparison: real servers, kvboost, plain transformers, and arms of our engine.

All get the same token ids and the same weights, on the same threads. A system that is not asked does not compute: idle
workers of vLLM spin on a core, so the processes of a server are stopped until its turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

import httpx
import psutil
import torch
from names import ITEMSIZE
from prompts import Trial, ids_of
from transformers import AutoModelForCausalLM

from spanlab.build import build_engine, build_policy
from spanlab.cli import compose
from spanlab.core.protocol import Arranger
from spanlab.core.scheduler import Scheduler
from spanlab.engine.model import SpanModel
from spanlab.settings import Study
from spanlab.study.servers.base import Launch, LlamaCpp, MistralRs, RunningServer, free_port, running

WORKER = Path(__file__).with_name("kvboost_worker.py")
LONGEST = 8192  # tokens of a request, which is the model's context
MINUTES = httpx.Timeout(1200.0)
#: Settings of the servers.
SERVER_WORDS = {
    "vllm": ["server.engine=vllm_cpu", "arms.vllm_0_32.pool.block_size=32"],
    "mistralrs": [*MistralRs.overrides, "server.engine=mistralrs"],
    "llama_cpp": [*LlamaCpp.overrides, "server.engine=llama_cpp"],
}
SERVER_WORDS["llama_cpp_reuse"] = [*SERVER_WORDS["llama_cpp"], "arms.llama_cpp.options.cache_reuse=32"]


@dataclass(frozen=True)
class Served:
    """Seconds to the first token, and prompt tokens that were not computed; None where the system does not tell."""

    seconds: float
    reused: int | None


class System(Protocol):
    """One system that serves requests; only one of them computes at a time."""

    def serve(self, trial: Trial, kinds: tuple[str, ...]) -> dict[str, Served]:
        """Serve these requests of a trial, one after another, by kind."""
        ...


def words_of(folder: Path, dtype: str) -> list[str]:
    """Return the settings of a model in a folder."""
    size = ITEMSIZE[dtype]
    items = [f"model.weight_itemsize={size}", f"model.kv_itemsize={size}"]
    batch = ["batch.max_num_batched_tokens=8192", "batch.max_num_seqs=1", f"engine.threads={len(cores())}"]
    return [f"model={folder}", "engine.weights=path", f"engine.path={folder}", *items, *batch]


@cache
def cores() -> tuple[int, ...]:
    """Return the cores that this process might use when it began; every system gets them."""
    return tuple(sorted(os.sched_getaffinity(0)))


def check_cores() -> None:
    """Raise ValueError where the process was bound to other cores meanwhile: systems would no longer be comparable."""
    if (now := tuple(sorted(os.sched_getaffinity(0)))) != cores():
        raise ValueError(f"this process was bound to cores {now}: expected {cores()}, as at the start")


# ------------------------------------------------------------------------------
# Servers and kvboost: processes of their own, which are stopped between their turns.
# ------------------------------------------------------------------------------


@contextmanager
def turn_of(process: int) -> Iterator[None]:
    """Let the processes below this one run; they are stopped again afterwards."""
    below = psutil.Process(process).children(recursive=True)
    for each in below:
        each.resume()
    try:
        yield
    finally:
        for each in below:
            each.suspend()


class Server:
    """A server of `spanlab.study.servers`, asked over HTTP."""

    def __init__(self, started: RunningServer) -> None:
        self._started, self._process = started, started.process.pid

    def serve(self, trial: Trial, kinds: tuple[str, ...]) -> dict[str, Served]:
        """As `System.serve`."""
        with turn_of(self._process), httpx.Client(timeout=MINUTES) as client:
            return {kind: self._ask(client, ids_of(trial.requests[kind])) for kind in kinds}

    def _ask(self, client: httpx.Client, prompt: list[int]) -> Served:
        body = {
            "model": self._started.launch.study.model.name,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._started.check_alive()
        first, usage, began = None, dict[str, Any](), time.perf_counter()
        with client.stream("POST", f"{self._started.base_url}/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                now, content = time.perf_counter(), line.removeprefix("data: ")
                if content == line or content == "[DONE]":
                    continue
                event = json.loads(content)
                if "error" in event:
                    raise ValueError(f"{self._started.launch.log}: the server answered {event['error']}")
                if first is None and event.get("choices"):
                    first = now - began
                usage |= event.get("usage") or {}
        if first is None:
            raise ValueError(f"{self._started.launch.log}: expected a token, the server sent none")
        details = usage.get("prompt_tokens_details") or {}
        return Served(first, details.get("cached_tokens"))


@contextmanager
def server(name: str, model: Path, dtype: str, folder: Path) -> Iterator[Server]:
    """Start a server, stopped until its first turn, and end it with the block."""
    study = compose("rendezvous", [*SERVER_WORDS[name], *words_of(model, dtype), "server.start_timeout_s=600"])
    assert isinstance(study, Study), "the entry is a study"
    # else vLLM leaves one core to its front end, on which nothing waits here
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores()))
    with running(Launch(study, folder / name, free_port(None), LONGEST)) as started:
        with turn_of(started.process.pid):
            pass
        try:
            yield Server(started)
        finally:
            for each in psutil.Process(started.process.pid).children(recursive=True):
                each.resume()  # a stopped process does not end when it is asked to


class KvBoost:
    """kvboost behind a pipe."""

    def __init__(self, process: subprocess.Popen[str], requests: IO[str], replies: IO[str]) -> None:
        self._process, self._requests, self._replies = process, requests, replies
        self._reply()  # it is ready

    def serve(self, trial: Trial, kinds: tuple[str, ...]) -> dict[str, Served]:
        """As `System.serve`."""
        return {kind: self._ask(ids_of(trial.requests[kind])) for kind in kinds}

    def _ask(self, prompt: list[int]) -> Served:
        self._requests.write(json.dumps(prompt) + "\n")
        self._requests.flush()
        reply = self._reply()
        return Served(reply["seconds"], reply["reused"])

    def _reply(self) -> dict[str, Any]:
        for line in self._replies:
            if line.startswith("{"):
                reply: dict[str, Any] = json.loads(line)
                return reply
        raise ValueError(f"kvboost ended with exit status {self._process.wait()}: see kvboost.log")


@contextmanager
def kvboost(python: Path, package: Path, model: Path, dtype: str, log: Path) -> Iterator[KvBoost]:
    """Start kvboost from the folder `package`, and end it with the block."""
    environment = os.environ | {"PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(WORKER), str(model), dtype, str(len(cores()))]
    pipe = subprocess.PIPE
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=environment) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            yield KvBoost(process, process.stdin, process.stdout)
        finally:
            process.stdin.close()


# ------------------------------------------------------------------------------
# Systems of this process: plain transformers, and arms of our engine.
# ------------------------------------------------------------------------------


class Transformers:
    """A model of transformers with its own attention (SDPA), without a cache between requests."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()

    @torch.inference_mode()
    def serve(self, trial: Trial, kinds: tuple[str, ...]) -> dict[str, Served]:
        """As `System.serve`."""
        found = {}
        for kind in kinds:
            ids = torch.tensor([ids_of(trial.requests[kind])])
            began = time.perf_counter()
            self._model(input_ids=ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax().item()
            found[kind] = Served(time.perf_counter() - began, 0)
        return found


class Arm:
    """An arm of our engine, with an empty cache at the start of each trial."""

    def __init__(self, study: Study, name: str, model: SpanModel) -> None:
        self._study, self._strategy, self._model = study, study.arms[name], model

    def serve(self, trial: Trial, kinds: tuple[str, ...]) -> dict[str, Served]:
        """As `System.serve`."""
        requests = [trial.requests[kind] for kind in kinds]
        policy = build_policy(self._study, self._strategy, 0, max(request.num_tokens for request in requests))
        engine = build_engine(self._study, self._strategy, self._model, policy, requests)
        scheduler, arranged = Scheduler(policy, self._study.batch), Arranger(self._strategy.passages, policy)
        found = {}
        for now, (kind, request) in enumerate(zip(kinds, requests, strict=True)):
            computed, began = 0, time.perf_counter()
            scheduler.add(arranged(request, now))
            while not scheduler.idle:
                step = scheduler.schedule(now)
                assert step is not None, "the store holds all requests"
                result = engine.execute(step, None)
                seconds = time.perf_counter() - began  # the answer has one token, which the last step gives
                scheduler.complete(step, now, result.finished)
                engine.completed(step)
                computed += sum(chunk.tokens for chunk in step.chunks)
            found[kind] = Served(seconds, request.num_tokens - computed)
        return found


def study_of_arms(folder: Path, dtype: str) -> Study:
    """Return the study that describes the arms of our engine."""
    given = ["+strategy@arms.cached_order=cached_order", *words_of(folder, dtype)]
    study = compose("pic_bench", given)
    assert isinstance(study, Study), "the entry is a study"
    return study


def opened(stack: ExitStack, name: str, context: AbstractContextManager[System]) -> System:
    """Enter the context of a system, and tell how long that took."""
    began = time.perf_counter()
    system = stack.enter_context(context)
    print(f"{name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
    return system
