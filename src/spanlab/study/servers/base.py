"""Real servers that a study starts by itself: their environment, process, address and log.

A server is one file here. Its process runs under `guard.py`, which ends it with the study, however the study ends.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar

import httpx

from spanlab.compiled import HOME
from spanlab.core.request import Request
from spanlab.engine.settings import remap_tokens
from spanlab.registry import Registry
from spanlab.settings.server import NO_ENGINE
from spanlab.settings.study import Study
from spanlab.study.servers import guard

LOOPBACK = "127.0.0.1"
_PERIOD_S = 0.25  # between two looks at a server that is starting
_HEALTH_S = 10.0  # a busy server may answer late
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
    `reset_path`   path to POST to that empties the cache; None: the server has none and is started again
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
        """Raise ValueError for a study that the server cannot serve, such as one of another cache."""
        (arm,) = study.chosen()
        if self.policy and study.arms[arm].policy_name != self.policy:
            chosen = f"only={study.runs.only} with server.engine={study.server.engine}"
            raise ValueError(f"{chosen}: expected an arm with policy={self.policy}")

    @abstractmethod
    def command(self, launch: Launch) -> list[str]:
        """Return the command that serves OpenAI's protocol at the port; its first word is a path or `python`."""

    def variables(self, launch: Launch) -> dict[str, str]:
        """Return further environment variables of the process."""
        return {}


#: Servers by the name that `server.engine` takes.
SERVERS: Registry[EmbeddedServer] = Registry("server")


def as_served(study: Study, requests: Sequence[Request]) -> Sequence[Request]:
    """Return requests as the server gets them: its own ids and answers, and no salts where it ignores them."""
    engine = study.server.engine
    knows_salts = engine == NO_ENGINE or SERVERS.make(engine, {}, {}).knows_salts
    mapped = remap_tokens(requests, study.model.vocab_size)
    salts = [request.cache_salt if knows_salts else "" for request in mapped]
    return [replace(request, output=None, cache_salt=salt) for request, salt in zip(mapped, salts, strict=True)]


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
        """Raise ValueError, with the end of its log, where the server has ended or says that it is not healthy."""
        if _is_healthy(f"{self.base_url}{self.kind.health_path}"):
            return
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2 * guard.GRACE_S)  # the guard ends what the server leaves behind
        if self.process.returncode is None:
            raise ValueError(_described(self.launch, f"does not answer {self.kind.health_path} any more"))
        raise ValueError(_ended(self.launch, "ended while requests were served", self.process.returncode))


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
        _await(process, f"{base_url}{kind.health_path}", settings.start_timeout_s, launch)
        yield RunningServer(kind, launch, base_url, process)


@contextmanager
def _guarded(command: list[str], variables: dict[str, str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
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


def _await(process: subprocess.Popen[bytes], url: str, timeout_s: float, launch: Launch) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if (status := process.poll()) is not None:
            raise ValueError(_ended(launch, "did not start", status))
        if _is_healthy(url):
            return
        if time.monotonic() > deadline:
            raise ValueError(_described(launch, f"did not answer within server.start_timeout_s={timeout_s:g}"))
        time.sleep(_PERIOD_S)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=_HEALTH_S).is_success
    except httpx.HTTPError:
        return False  # it does not listen, yet or any more


def _ended(launch: Launch, what: str, status: int) -> str:
    return _described(launch, f"{what}: exit status {status}")


def _described(launch: Launch, what: str) -> str:
    """Return one sentence about a server, with the end of its log."""
    lines = [line.strip() for line in launch.log.read_text(errors="replace").splitlines() if line.strip()]
    errors = (_ERROR.search(line) for line in lines if "WARN" not in line)
    first = next(filter(None, errors), None)  # later ones mostly follow from it
    cause = "" if first is None else f"its first error is {first[0][:_LONGEST_LINE]}; "
    end = " | ".join(line[:_LONGEST_LINE] for line in lines[-_LINES:])
    return f"server.engine={launch.study.server.engine}: the server {what}; {cause}see {launch.log}, which ends: {end}"


def free_port(wanted: int | None) -> int:
    """Return a free port of the loopback interface; ValueError where the one that is wanted is in use."""
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, wanted or 0))
        except OSError as error:
            raise ValueError(f"server.port={wanted}: expected a free port ({error.strerror})") from error
        return int(probe.getsockname()[1])


def set_up(environment: str) -> Path:
    """Install an environment if it is missing, and return its Python; ValueError where that fails."""
    python = HOME / ".venvs" / environment / "bin" / "python"
    script = f'source "{HOME}/requirements/setup.sh"; set_up {environment}'
    done = subprocess.run(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=_STDERR, check=False)
    if done.returncode:
        raise ValueError(f"the environment {environment} could not be set up, see above; expected {python}")
    return python
