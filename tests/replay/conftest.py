"""A test server in a separate process."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class RunningServer:
    """A running server."""

    url: str

    def received(self) -> dict[str, Any]:
        """Received requests in order, and the number of cache resets."""
        with urlopen(f"{self.url}/received", timeout=30) as reply:
            received: dict[str, Any] = json.load(reply)
            return received


@contextmanager
def serving(script: str = "openai_server.py", **faults: Any) -> Iterator[RunningServer]:
    """A server with faults, while this lasts."""
    command = [sys.executable, str(FOLDER / script), json.dumps(faults)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RunningServer(f"http://127.0.0.1:{process.stdout.readline().strip()}")
        finally:
            process.terminate()


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Start a server with faults."""
    with ExitStack() as running:
        yield lambda *script, **faults: running.enter_context(serving(*script, **faults))
