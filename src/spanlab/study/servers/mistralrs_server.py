"""Serves a model by mistral.rs over OpenAI's protocol: python mistralrs_server.py FOLDER --name N
--port P ….

It runs in the environment `mistralrs`, whose package has no server, and needs nothing of spanlab.
Prompts are token ids. mistral.rs takes texts, so the model gets a tokenizer with one word per id: a
prompt has the tokens of its ids.
"""

import argparse
import json
import tempfile
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mistralrs import ChatCompletionRequest, Runner, Which  # type: ignore[import-not-found]  # of that environment

WORD = "t{}"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # streams come from chats alone
LARGEST_BODY = 1 << 26


def linked_folder(source: Path, target: Path) -> Path:
    """Fill a folder with a model's weights and settings as mistral.rs reads them, and a tokenizer
    of words."""
    config = json.loads((source / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        # mistral.rs reads the form of transformers 4
        config.setdefault("rope_theta", rope["rope_theta"])
    # a prompt of its own, with which mistral.rs warms up and which it keeps, becomes this token
    end = config.get("eos_token_id") or 0
    words = {WORD.format(token): token for token in range(config["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {"type": "WordLevel", "vocab": words, "unk_token": WORD.format(end)},
    }
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"eos_token": WORD.format(end), "chat_template": TEMPLATE}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    for file in source.glob("*.safetensors*"):
        (target / file.name).symlink_to(file.resolve())
    return target


class BadRequestError(Exception):
    """A request that is not served; the message says what was expected."""


def request_of(body: dict[str, Any], vocabulary: int) -> ChatCompletionRequest:
    """Return the request of a body of /v1/completions."""
    prompt, tokens = body.get("prompt"), body.get("max_tokens")
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(type(token) is int for token in prompt)
    ):
        raise BadRequestError("prompt: expected a list of token ids")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise BadRequestError(f"prompt: expected token ids from 0 to {vocabulary - 1}")
    if type(tokens) is not int or tokens < 1:
        raise BadRequestError(f"max_tokens={tokens}: expected a whole number above zero")
    text = " ".join(map(WORD.format, prompt))
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": text}],
        model="default",
        max_tokens=tokens,
        temperature=float(body.get("temperature", 0.0)),
        stream=True,
        ignore_eos=bool(body.get("ignore_eos", False)),
    )


def usage_of(usage: Any) -> dict[str, Any]:
    """Return OpenAI's token counts."""
    details = usage.prompt_tokens_details  # None where nothing was reused
    cached = 0 if details is None else details.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Handler(BaseHTTPRequestHandler):
    """Answers /health, /v1/models and streamed /v1/completions; a subclass has the runner and its
    model."""

    runner: Runner
    name: str
    vocabulary: int
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer whether it serves, or the list of its one model."""
        if self.path == "/health":
            self._reply(HTTPStatus.OK, {"status": "ok"})
        elif self.path == "/v1/models":
            self._reply(
                HTTPStatus.OK, {"object": "list", "data": [{"id": self.name, "object": "model"}]}
            )
        else:
            self._reply(HTTPStatus.NOT_FOUND, {"error": {"message": f"no such path: {self.path}"}})

    def do_POST(self) -> None:
        """Stream a completion, and its token counts at the end."""
        try:
            length = int(self.headers.get("Content-Length", 0))
            if self.path != "/v1/completions" or not 0 < length <= LARGEST_BODY:
                raise BadRequestError("expected a body of /v1/completions")
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict) or not body.get("stream"):
                raise BadRequestError("expected a JSON object with stream=true")
            request = request_of(body, self.vocabulary)
        except (BadRequestError, ValueError) as error:
            self._reply(HTTPStatus.BAD_REQUEST, {"error": {"message": str(error)}})
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for chunk in self.runner.send_chat_completion_request(request):
                choices = [
                    {
                        "index": 0,
                        "text": choice.delta.content or "",
                        "finish_reason": choice.finish_reason,
                    }
                    for choice in chunk.choices
                ]
                event = {
                    "id": chunk.id,
                    "object": "text_completion",
                    "model": self.name,
                    "choices": choices,
                }
                if chunk.usage is not None:
                    event["usage"] = usage_of(chunk.usage)
                self._write(event)
        except Exception as error:  # whatever mistral.rs raises becomes the end of the stream
            self._write({"error": {"message": str(error)}})
            return
        self.wfile.write(b"data: [DONE]\n\n")

    def _write(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _reply(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Load the model and serve it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-seqs", type=int, default=16)
    parser.add_argument("--prefix-cache-n", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = linked_folder(given.folder, Path(temporary))
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        runner = Runner(
            Which.Plain(model_id=str(folder)),
            max_seqs=given.max_seqs,
            prefix_cache_n=given.prefix_cache_n,
            no_paged_attn=True,
        )
        handler = type(
            "Served", (Handler,), {"runner": runner, "name": given.name, "vocabulary": vocabulary}
        )
        ThreadingHTTPServer((given.host, given.port), handler).serve_forever()


if __name__ == "__main__":
    main()
