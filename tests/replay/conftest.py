"""A server in a process of its own, ended by its own handle."""

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
class Served:
    """A running server."""

    url: str

    def seen(self) -> dict[str, Any]:
        """Requests in order, and how often the cache was emptied."""
        with urlopen(f"{self.url}/seen", timeout=30) as reply:
            found: dict[str, Any] = json.load(reply)
            return found


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start a server with faults."""
    running: list[subprocess.Popen[str]] = []

    def start(**faults: Any) -> Served:
        command = [sys.executable, str(SCRIPT), json.dumps(faults)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        port = running[-1].stdout.readline().strip()
        return Served(f"http://127.0.0.1:{port}")

    yield start
    for process in running:
        process.terminate()
        process.wait(30)
        process.stdout.close()
