"""Real servers that a study starts by itself: their environment, model, process, address and log.

A kind of server is a class with its command line. The process runs under `guard.py`, which ends it
with the study, however the study ends.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar

import httpx
import orjson

from spanlab.compiled import HOME
from spanlab.core.policies.block_pool import block_shape
from spanlab.core.policies.named import POLICIES
from spanlab.core.request import UNLIMITED, Request
from spanlab.engine.settings import dtype_of, remap_tokens
from spanlab.model_files import cache_folder, find_config, packaged, packaged_folder
from spanlab.registry import Registry
from spanlab.settings.server import NO_ENGINE, held_token_bytes
from spanlab.settings.study import Study
from spanlab.study.servers import guard

LOOPBACK = "127.0.0.1"
_PERIOD_S = 0.25  # between two looks at a server that is starting
_HEALTH_S = 10.0  # a busy server may answer late
_MODEL_SCRIPT = Path(__file__).with_name("make_model.py")
_MAKER = "vllm_cpu"  # the environment of a server that has torch and transformers
_LINES = 3  # of its log, in an error
_LONGEST_LINE = 200
_STDERR = 2  # sys.stderr may be an object without a file, as in a notebook
_ERROR = re.compile(r"\b\w*(?:Error|Exception): .+")


@dataclass(frozen=True)
class Launch:
    """What to start.

    `study`    its model, arm, batch limits and store describe the server
    `folder`   for the server's files: log, steps
    `port`     a free port of the loopback interface
    `longest`  tokens of the longest request, its output included
    """

    study: Study
    folder: Path
    port: int
    longest: int

    @property
    def log(self) -> Path:
        """Everything that the server prints."""
        return self.folder / "server.log"

    @property
    def steps(self) -> Path:
        """Decisions of the server's scheduler, where a hook writes them."""
        return self.folder / "steps.jsonl"


class EmbeddedServer(ABC):
    """A kind of server.

    `environment`  the pins in requirements/, and the folder in .venvs/
    `version`      of the server that they install
    `policy`       of the arms that it serves; empty: any
    `overrides`    of the entry `rendezvous`, for a study that it serves
    `reset_path`   path to POST to that empties the cache; None: the server has none and is started
                   again
    `health_path`  path that answers once requests are served
    `logs_steps`   whether `Launch.steps` is written
    `knows_salts`  whether requests with different `cache_salt` share nothing
    """

    environment: ClassVar[str]
    version: ClassVar[str]
    policy: ClassVar[str] = ""
    overrides: ClassVar[tuple[str, ...]] = ()
    reset_path: ClassVar[str | None] = None
    health_path: ClassVar[str] = "/health"
    logs_steps: ClassVar[bool] = False
    knows_salts: ClassVar[bool] = True

    def python(self) -> Path:
        """Return the Python of its environment, which is installed if it is missing."""
        return set_up(self.environment)

    def check(self, study: Study) -> None:
        """Raise ValueError for a study that the server cannot serve, such as one of another
        cache."""
        (arm,) = study.chosen()
        if self.policy and study.arms[arm].policy_name != self.policy:
            chosen = f"only={study.runs.only} with server.engine={study.server.engine}"
            raise ValueError(f"{chosen}: expected an arm with policy={self.policy}")

    @abstractmethod
    def command(self, launch: Launch) -> list[str]:
        """Return the command that serves OpenAI's protocol at the port; its first word is a path or
        `python`."""

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return further environment variables of the process."""
        return {}


#: Servers by the name that `server.engine` takes.
SERVERS: Registry[EmbeddedServer] = Registry("server")


def as_served(study: Study, requests: Sequence[Request]) -> Sequence[Request]:
    """Return requests as the server gets them: its own ids and answers, and no salts where it
    ignores them."""
    engine = study.server.engine
    knows_salts = engine == NO_ENGINE or SERVERS.make(engine, {}, {}).knows_salts
    mapped = remap_tokens(requests, study.model.vocab_size)
    salts = [request.cache_salt if knows_salts else "" for request in mapped]
    return [
        replace(request, output=None, cache_salt=salt)
        for request, salt in zip(mapped, salts, strict=True)
    ]


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    `base_url`  its address
    `launch`    what it was started with
    `process`   its guard
    """

    kind: EmbeddedServer
    launch: Launch
    base_url: str
    process: subprocess.Popen[bytes]

    def check_alive(self) -> None:
        """Raise ValueError, with the end of its log, where the server has ended or says that it is
        not healthy."""
        if _is_healthy(f"{self.base_url}{self.kind.health_path}"):
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * guard.GRACE_S)  # the guard ends what the server leaves behind
        if self.process.returncode is None:
            raise ValueError(
                _described(self.launch, f"does not answer {self.kind.health_path} any more")
            )
        raise ValueError(
            _ended(self.launch, "ended while requests were served", self.process.returncode)
        )


@contextmanager
def running(launch: Launch) -> Iterator[RunningServer]:
    """Start the server of a study, wait until it answers, and end it with the block.

    Raises ValueError, with the last lines of its log, for a server that does not start.
    """
    settings = launch.study.server
    kind = SERVERS.make(settings.engine, {}, {})
    launch.folder.mkdir(parents=True, exist_ok=True)
    first, *words = kind.command(launch)
    command = [str(kind.python()) if first == "python" else first, *words]
    with launch.log.open("ab") as log, _guarded(command, kind.variables(launch), log) as process:
        base_url = f"http://{LOOPBACK}:{launch.port}"
        timeout_s = settings.start_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            if (status := process.poll()) is not None:
                raise ValueError(_ended(launch, "did not start", status))
            if _is_healthy(f"{base_url}{kind.health_path}"):
                break
            if time.monotonic() > deadline:
                raise ValueError(
                    _described(
                        launch, f"did not answer within server.start_timeout_s={timeout_s:g}"
                    )
                )
            time.sleep(_PERIOD_S)
        yield RunningServer(kind, launch, base_url, process)


@contextmanager
def _guarded(
    command: list[str], variables: dict[str, str], log: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    process = subprocess.Popen(
        [sys.executable, "-I", guard.__file__, *command],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=inherited | variables,
        start_new_session=True,  # an interrupt from the terminal reaches the study alone
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_HEALTH_S).is_success
    except httpx.HTTPError:
        return False  # it does not listen, yet or any more


def _ended(launch: Launch, what: str, status: int) -> str:
    return _described(launch, f"{what}: exit status {status}")


def _described(launch: Launch, what: str) -> str:
    """Return one sentence about a server, with the end of its log."""
    lines = [
        line.strip() for line in launch.log.read_text(errors="replace").splitlines() if line.strip()
    ]
    errors = (_ERROR.search(line) for line in lines if "WARN" not in line)
    first = next(filter(None, errors), None)  # later ones mostly follow from it
    cause = "" if first is None else f"its first error is {first[0][:_LONGEST_LINE]}; "
    end = " | ".join(line[:_LONGEST_LINE] for line in lines[-_LINES:])
    log = f"{launch.log}, which ends: {end}" if end else f"{launch.log}, which is empty"
    return f"server.engine={launch.study.server.engine}: the server {what}; {cause}see {log}"


def free_port(wanted: int | None) -> int:
    """Return a free port of the loopback interface; ValueError where the one that is wanted is in
    use."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, wanted or 0))
        except OSError as error:
            raise ValueError(
                f"server.port={wanted}: expected a free port ({error.strerror})"
            ) from error
        return int(probe.getsockname()[1])


def set_up(environment: str) -> Path:
    """Install an environment if it is missing, and return its Python; ValueError where that
    fails."""
    python = HOME / ".venvs" / environment / "bin" / "python"
    script = f'source "{HOME}/requirements/setup.sh"; set_up {environment}'
    done = subprocess.run(
        ["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=_STDERR, check=False
    )
    if done.returncode:
        raise ValueError(
            f"the environment {environment} could not be set up, see above; expected {python}"
        )
    return python


# ------------------------------------------------------------------------------
# The model of a study as a folder that a server loads.
# ------------------------------------------------------------------------------


def served_folder(study: Study) -> Path:
    """Return the Hugging Face folder of a study's model: packaged, of a path, or with weights drawn
    here.

    Drawn weights are kept in the user's cache. ValueError where they cannot be drawn.
    """
    engine, name = study.engine, study.engine.name or study.model.name
    if engine.weights == "package":
        return packaged_folder(packaged(name, "engine.weights=package with model.name"))
    if engine.weights == "path":
        return Path(str(engine.path))
    if engine.weights != "random":
        raise ValueError(
            f"engine.weights={engine.weights} with server.engine: expected package, path or random"
        )
    content = orjson.dumps(find_config(name, "model.name").keys, option=orjson.OPT_SORT_KEYS)
    dtype, seed = dtype_of(study.model), str(engine.seed)
    digest = hashlib.sha256(b" ".join([content, dtype.encode(), seed.encode()])).hexdigest()[:16]
    folder = cache_folder() / "models" / digest / name
    if not folder.is_dir():
        _draw(content, folder, dtype, seed)
    return folder


def _draw(config: bytes, folder: Path, dtype: str, seed: str) -> None:
    """Draw the weights of a model; its folder appears complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    try:
        source = temporary / "source.json"
        source.write_bytes(config)
        command = [set_up(_MAKER), "-I", _MODEL_SCRIPT, source, temporary, dtype, seed]
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ValueError(f"model.name={folder.name}: its weights could not be drawn: {last}")
        source.unlink()
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# ------------------------------------------------------------------------------
# llama.cpp's server for CPUs: the version of the preset `llama_cpp`, built from the source of a
# Python package.
# ------------------------------------------------------------------------------

_LLAMA_SERVER = Path(__file__).with_name("llama_server.py")
_CONTEXT_UNIT = 256  # tokens; a slot's context has a multiple of it
_MIB_PER_GIB = 1024


@SERVERS.register("llama_cpp")
class LlamaCpp(EmbeddedServer):
    """llama.cpp of October 2026 (llama-cpp-python 0.3.36) for CPUs: slots of one sequence."""

    environment = "llama_cpp"
    version = "0c1e57098"
    policy = "slots"
    overrides = ("arms=presets", "only=[llama_cpp]", "baseline=llama_cpp")
    knows_salts = False

    def command(self, launch: Launch) -> list[str]:
        """Return the command of the server; the study's store is its context, in whole units of 256
        tokens."""
        study = launch.study
        (arm,) = study.chosen()
        rules = POLICIES.schema(self.policy)(**study.arms[arm].options)
        # the tokens of all slots, in equal parts where each has its own
        limit = min(study.store.budget.total_bytes, study.store.budget.kv_bytes)
        unit = _CONTEXT_UNIT * (1 if rules.kv_unified else rules.parallel)
        if limit >= UNLIMITED:  # each slot takes the longest request
            context = math.ceil(rules.parallel * launch.longest / unit) * unit
        else:
            tokens = limit // held_token_bytes(study.model, study.batch)
            context = max(unit, tokens // unit * unit)
        options = {
            "alias": study.model.name,
            "host": LOOPBACK,
            "port": launch.port,
            "ctx-size": context,
            "parallel": rules.parallel,
            "batch-size": study.batch.max_num_batched_tokens,
            "slot-prompt-similarity": rules.slot_prompt_similarity,
            "cache-reuse": rules.cache_reuse,
            "cache-ram": round(rules.cache_ram_gib * _MIB_PER_GIB),
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        flags = [
            "--kv-unified" if rules.kv_unified else "--no-kv-unified",
            "--cache-idle-slots" if rules.cache_idle_slots else "--no-cache-idle-slots",
        ]
        model = launch.folder / "model.gguf"
        words = [str(_LLAMA_SERVER), str(served_folder(study)), str(model), "--", *given, *flags]
        return ["python", "-I", *words, *study.server.arguments]


# ------------------------------------------------------------------------------
# mistral.rs for CPUs: the version of the preset `mistralrs_0_9`, behind a server of this package.
# ------------------------------------------------------------------------------

_MISTRALRS_SERVER = Path(__file__).with_name("mistralrs_server.py")


@SERVERS.register("mistralrs")
class MistralRs(EmbeddedServer):
    """mistral.rs 0.9.5 for CPUs: prefix caching of whole sequences, of which it evicts none."""

    environment = "mistralrs"
    version = "0.9.5"
    policy = "sequences"
    overrides = (
        *("arms=presets", "only=[mistralrs_0_9]", "baseline=mistralrs_0_9"),
        "arms.mistralrs_0_9.options.prefix_cache_n=null",
    )
    knows_salts = False

    def check(self, study: Study) -> None:
        """Raise ValueError for an arm of another cache, or with an eviction that a CPU does not
        have."""
        super().check(study)
        (arm,) = study.chosen()
        limit = study.arms[arm].options.get("prefix_cache_n", 16)
        if limit is not None:
            raise ValueError(
                f"arms.{arm}.options.prefix_cache_n={limit} with server.engine=mistralrs: "
                "expected null, for on a CPU mistral.rs evicts no sequence"
            )

    def command(self, launch: Launch) -> list[str]:
        """Return the command of the server."""
        study = launch.study
        options = {
            "name": study.model.name,
            "host": LOOPBACK,
            "port": launch.port,
            "max-seqs": study.batch.max_num_seqs,
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [
            "python",
            "-I",
            str(_MISTRALRS_SERVER),
            str(served_folder(study)),
            *given,
            *study.server.arguments,
        ]

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return what keeps the server offline."""
        return {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}


# ------------------------------------------------------------------------------
# vLLM for CPUs: the version of the preset `vllm_0_32`, with the decisions of its scheduler in a
# log.
# ------------------------------------------------------------------------------

VLLM_PRESET = "vllm_0_32"
_VLLM_HOOK = Path(__file__).parent / "vllm_hook"
_VLLM_KV_GIB = 2  # of a server whose study sets no limit
_VLLM_WIDTH = 32  # blocks of its attention on a CPU have multiples of this many tokens


@SERVERS.register("vllm_cpu")
class VllmCpu(EmbeddedServer):
    """vLLM 0.32.0 for CPUs: prefix caching in blocks, hybrids included."""

    environment = "vllm_cpu"
    version = "0.32.0"
    reset_path = "/reset_prefix_cache"
    logs_steps = True

    def check(self, study: Study) -> None:
        """Raise ValueError for an arm that is no pool of blocks, or for blocks that its attention
        does not have."""
        size = _block_size(study)
        if size is not None and size % _VLLM_WIDTH:
            (arm,) = study.chosen()
            raise ValueError(
                f"arms.{arm}.pool.block_size={size} with server.engine=vllm_cpu: "
                f"expected a multiple of {_VLLM_WIDTH}, or null for the server's own"
            )

    def command(self, launch: Launch) -> list[str]:
        """Return the command of the server; the study's store is the number of its blocks."""
        study, batch = launch.study, launch.study.batch
        options: dict[str, object] = {
            "model": served_folder(study),
            "served-model-name": study.model.name,
            "host": LOOPBACK,
            "port": launch.port,
            "dtype": dtype_of(study.model),
            "seed": study.engine.seed,
            "max-num-seqs": batch.max_num_seqs,
            "max-num-batched-tokens": batch.max_num_batched_tokens,
            "max-model-len": launch.longest,
        }
        if (size := _block_size(study)) is not None:
            options["block-size"] = size
            shape = block_shape(study.model, held_token_bytes(study.model, study.batch), size)
            if (limit := shape.limit(study.store.budget)) < UNLIMITED:
                # one is its null block
                options["num-gpu-blocks-override"] = shape.pool(limit).num_blocks + 1
        flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
        flags += ["--async-scheduling"] if batch.async_scheduling else ["--no-async-scheduling"]
        flags += [] if batch.enable_chunked_prefill else ["--no-enable-chunked-prefill"]
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [
            "python",
            "-m",
            "vllm.entrypoints.openai.api_server",
            *given,
            *flags,
            *study.server.arguments,
        ]

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return what keeps the server offline and writes its steps."""
        return {
            "PYTHONPATH": str(_VLLM_HOOK),
            "SPANLAB_STEP_LOG": str(launch.steps),
            "VLLM_SERVER_DEV_MODE": "1",  # has the path that empties the cache
            "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }


def _block_size(study: Study) -> int | None:
    """Return the block size that the study sets, None for the server's own; ValueError for an arm
    without a pool."""
    (arm,) = study.chosen()
    if (pool := study.arms[arm].pool) is None:
        raise ValueError(
            f"only={study.runs.only} with server.engine=vllm_cpu: expected {VLLM_PRESET}"
        )
    return pool.block_size
