"""A small OpenAI-compatible server for tests, in a process of its own: prints its port, then serves until it is ended.

It reuses whole blocks of earlier prompts and streams as many chunks as tokens are asked for. Faults are its arguments,
as JSON: models (names), fails_at and breaks_at (requests that get an error, or half a stream), usage, cached, and what
it says in place of its first chunk.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 16
FAULTS = {"models": ["toy"], "fails_at": [], "breaks_at": [], "usage": True, "cached": True, "says": None}
FAULTS |= json.loads(sys.argv[1])


class State:
    """What the server has seen: bodies in order, and the blocks of their prompts."""

    def __init__(self) -> None:
        self.lock, self.asked, self.resets = threading.Lock(), [], 0
        self.blocks: set[tuple] = set()

    def take(self, path: str, headers: dict, body: dict) -> tuple[int, int]:
        """The number of a request, and how many tokens of its prompt are known."""
        with self.lock:
            self.asked.append({"path": path, "authorization": headers.get("Authorization"), "body": body})
            prompt = tokens_of(body)
            ends = range(BLOCK, len(prompt) + 1, BLOCK)
            known = max((end for end in ends if tuple(prompt[:end]) in self.blocks), default=0)
            self.blocks |= {tuple(prompt[:end]) for end in ends}
            return len(self.asked) - 1, known

    def reset(self) -> None:
        with self.lock:
            self.blocks.clear()
            self.resets += 1


def tokens_of(body: dict) -> list:
    asked = body.get("prompt", body.get("messages"))
    return asked if isinstance(asked, list) and asked and isinstance(asked[0], int) else list(str(asked))


STATE = State()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        seen = {"asked": STATE.asked, "resets": STATE.resets}
        self._json(200, seen if self.path == "/seen" else {"data": [{"id": name} for name in FAULTS["models"]]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/reset":
            STATE.reset()
            self._json(200, {})
            return
        number, known = STATE.take(self.path, dict(self.headers), body := json.loads(data))
        if number in FAULTS["fails_at"]:
            self._json(400, {"error": {"message": "too long for me"}})
        else:
            self._stream(number, known, body)

    def _json(self, code: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, number: int, known: int, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(body["max_tokens"]):
            if number in FAULTS["breaks_at"] and at == 1:
                self.close_connection = True
                return
            if FAULTS["says"] is not None and not at:
                self._chunk(f"data: {FAULTS['says']}\n\n".encode())
            else:
                self._event({"choices": [{"text": "", "index": 0}]})
        prompt = len(tokens_of(body))
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        if FAULTS["cached"]:
            usage["prompt_tokens_details"] = {"cached_tokens": min(known, prompt - 1)}
        if FAULTS["usage"]:
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no news."""


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
