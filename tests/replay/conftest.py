"""A test server in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

SCRIPT = Path(__file__).with_name("openai_server.py")


@dataclass(frozen=True)
class RunningServer:
    """A running server."""

    url: str

    def received(self) -> dict[str, Any]:
        """Received requests in order, and the number of cache resets."""
        with urlopen(f"{self.url}/received", timeout=30) as reply:
            received: dict[str, Any] = json.load(reply)
            return received


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    """Start a server with faults."""
    running: list[subprocess.Popen[str]] = []

    def start(**faults: Any) -> RunningServer:
        command = [sys.executable, str(SCRIPT), json.dumps(faults)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        port = running[-1].stdout.readline().strip()
        return RunningServer(f"http://127.0.0.1:{port}")

    yield start
    for process in running:
        process.terminate()
        process.wait(30)
        process.stdout.close()
