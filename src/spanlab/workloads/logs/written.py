"""Prompts of a log as bodies of chat completions, one per line: a mended log, which a server can be asked again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from spanlab.workloads.files import write_atomically
from spanlab.workloads.logs.bodies import Message, Opaque, Prompt, Rewrite
from spanlab.workloads.logs.log import Log

#: Fields of a body that name a part of a cache identity, as `identity_of` reads them.
_IDENTITY = {
    "model": "model",
    "adapter": "lora_name",
    "salt": "cache_salt",
    "rank": "data_parallel_rank",
    "media": "mm_hashes",
}


def write_log(log: Log, rewrite: Rewrite, path: Path) -> int:
    """Write the requests of a log with changed prompts as JSON lines of the format `openai`; return their number.

    Requests whose prompt the log does not have are left out. ValueError if the file exists.
    """
    assert log.source is not None, "a log with prompts was read from a file"
    if path.exists():
        raise ValueError(f"write_fixed={path}: the file exists; expected a new name")
    has_template, prompts = log.source.options.template is not None, log.source.prompts
    written = [request for request, prompt in enumerate(prompts) if prompt is not None]

    def write(file: Any) -> None:
        for request in written:
            body = body_of(rewrite(prompts[request]), has_template=has_template)
            file.write(orjson.dumps(_line(log, request, body), option=orjson.OPT_APPEND_NEWLINE))

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)
    return len(written)


def _line(log: Log, request: int, body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with its time, session, tenant and cache identity."""
    line: dict[str, Any] = {}
    if log.arrived_ns.any():
        line["timestamp"] = int(log.arrived_ns[request]) / 1e9
    if log.sessions is not None:
        line["session_id"] = int(log.sessions[request])
    if log.tenants is not None:
        line["tenant"] = log.tenant_names[log.tenants[request]]
    if log.identities is not None:
        identity = log.identity_names[log.identities[request]]
        body |= {_IDENTITY[name]: value for name, value in identity if name in _IDENTITY}
    output = int(log.output_lens[request])
    return line | {"output_length": output, "body": body | ({"max_tokens": output} if output else {})}


def body_of(prompt: Prompt, *, has_template: bool = False) -> dict[str, Any]:
    """Return the body of a request that reads as this prompt; `has_template`: a template reads its arguments."""
    body: dict[str, Any] = {}
    if prompt.tokens is not None:
        return {"prompt": prompt.tokens.tolist()}
    if prompt.messages and prompt.messages[0].path == "prompt" and not prompt.messages[0].role:
        body["prompt"] = "".join(block for block in prompt.messages[0].blocks if isinstance(block, str))
    else:
        apart = [message for message in prompt.messages if not message.role]
        if apart:
            body["system"] = [_block(block) for message in apart for block in message.blocks]
        body["messages"] = [_message(message) for message in prompt.messages if message.role]
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    if prompt.documents:
        body["documents"] = list(prompt.documents)
    if prompt.history is not None:
        body |= {"prompt": prompt.history.block} if prompt.history.kind == "prompt" else prompt.history.block
    if has_template and prompt.arguments:
        body["chat_template_kwargs"] = dict(prompt.arguments)
    return body


def _message(message: Message) -> dict[str, Any]:
    blocks = message.blocks
    is_text = len(blocks) < 2 and all(isinstance(block, str) for block in blocks)
    content = "".join(map(str, blocks)) if is_text else [_block(block) for block in blocks]
    return {"role": message.role, "content": content, **message.fields}


def _block(block: str | Opaque) -> Mapping[str, Any]:
    return {"type": "text", "text": block} if isinstance(block, str) else block.block
