"""A small OpenAI-compatible server for tests: prints its port, then serves until the process is terminated.

It reuses full blocks of earlier prompts and streams one chunk per requested token. Its argument is JSON with faults:
models (names); fails_at and breaks_at (requests that get an error, or an incomplete stream); usage and cached (whether
they are reported); counts (keys that replace those of usage); says (data that replaces the first chunk); sends (text
after the first chunk, again and again); pause_s (before each chunk); encoding (header of streams); error (text of
errors, where {key} is the key of the request).
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 16
FAULTS = {"models": ["toy"], "fails_at": [], "breaks_at": [], "usage": True, "cached": True, "says": None}
FAULTS |= {"counts": {}, "error": "too long for me", "sends": None, "encoding": None, "pause_s": 0}
FAULTS |= json.loads(sys.argv[1])


class State:
    """Received requests in order, and the blocks of their prompts."""

    def __init__(self) -> None:
        self.lock, self.requests, self.resets = threading.Lock(), [], 0
        self.blocks: set[tuple] = set()

    def record(self, path: str, headers: dict, body: dict) -> tuple[int, int]:
        """Record a request; return its number and the number of cached tokens of its prompt."""
        with self.lock:
            self.requests.append({"path": path, "authorization": headers.get("Authorization"), "body": body})
            prompt = tokens_of(body)
            ends = range(BLOCK, len(prompt) + 1, BLOCK)
            cached = max((end for end in ends if tuple(prompt[:end]) in self.blocks), default=0)
            self.blocks |= {tuple(prompt[:end]) for end in ends}
            return len(self.requests) - 1, cached

    def reset(self) -> None:
        with self.lock:
            self.blocks.clear()
            self.resets += 1


def tokens_of(body: dict) -> list:
    prompt = body.get("prompt", body.get("messages"))
    return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else list(str(prompt))


STATE = State()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        received = {"requests": STATE.requests, "resets": STATE.resets}
        self._json(200, received if self.path == "/received" else {"data": [{"id": name} for name in FAULTS["models"]]})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/reset":
            STATE.reset()
            self._json(200, {})
            return
        number, cached = STATE.record(self.path, dict(self.headers), body := json.loads(data))
        if number in FAULTS["fails_at"]:
            key = self.headers.get("Authorization", "")
            self._json(400, {"error": {"message": FAULTS["error"].replace("{key}", key)}})
        else:
            self._stream(number, cached, body)

    def _json(self, code: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, number: int, cached: int, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        if FAULTS["encoding"] is not None:
            self.send_header("Content-Encoding", FAULTS["encoding"])
        self.end_headers()
        for index in range(body["max_tokens"]):
            time.sleep(FAULTS["pause_s"])
            if number in FAULTS["breaks_at"] and index == 1:
                self.close_connection = True
                return
            if FAULTS["says"] is not None and not index:
                self._chunk(f"data: {FAULTS['says']}\n\n".encode())
            else:
                self._event({"choices": [{"text": "", "index": 0}]})
            while FAULTS["sends"] is not None:
                self._chunk(FAULTS["sends"].encode() * 1000)
        prompt = len(tokens_of(body))
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"]}
        if FAULTS["cached"]:
            usage["prompt_tokens_details"] = {"cached_tokens": min(cached, prompt - 1)}
        usage |= FAULTS["counts"]
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
        """Ignore clients that disconnect."""


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
