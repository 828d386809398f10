"""A judge on loopback that sends the replies set by each test."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass
class Endpoint:
    """Replies of the endpoint, and received requests as (path, headers, body)."""

    url: str = ""
    contents: list[Any] = field(default_factory=list)  # message contents, in order; the last one is repeated
    raw: bytes | None = None  # a complete body instead
    status: int = 200
    location: str = ""
    silence: threading.Event | None = None  # no reply until this is set
    received: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    def reply(self) -> bytes:
        """The body of the next reply."""
        if self.raw is not None:
            return self.raw
        content = self.contents.pop(0) if len(self.contents) > 1 else self.contents[0]
        return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """A fresh endpoint that stops with its test."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Endpoint(contents=['{"score": 50}'])
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(state))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    if state.silence is not None:
        state.silence.set()
    server.shutdown()
    server.server_close()
    thread.join()


def _handler(state: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            state.received.append((self.path, dict(self.headers), body))
            if state.silence is not None:
                state.silence.wait(10)
                return
            reply = state.reply()
            self.send_response(state.status)
            if state.location:
                self.send_header("Location", state.location)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, format: str, *args: object) -> None:
            """Suppress log output."""

    return Handler
