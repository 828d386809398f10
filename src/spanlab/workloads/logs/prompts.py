"""Prompts of a log in a temporary file: each message once, however many prompts repeat it.

A conversation of n calls repeats its first message n times. Later readings of the log then cost
what is new in each prompt, and texts in memory are bounded whatever the size of the log.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import orjson

from spanlab.workloads.files import write_atomically
from spanlab.workloads.logs.bodies import Opaque, Prompt, Rewrite
from spanlab.workloads.logs.log import Log

_BYTES_IN_MEMORY = 1 << 24  # of parts that were read last, as they stand in the file
_NAMES_IN_MEMORY = 1 << 20  # parts that are recognised when they come again
_APART = 3  # parts of a prompt before its messages: tools, documents, and what else it has


class Prompts(Sequence[Prompt | None]):
    """Prompts by request: those that were added, in the order that `select` gives them.

    Prompts that repeat a message have the same object of it, as long as it is in memory.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - removed with this object
        self._places = array("q", [0])  # where each part ends in the file
        self._parts, self._starts = array("q"), array("q", [0])
        self._names = OrderedDict[int, int]()
        self._objects = OrderedDict[int, Any]()
        self._in_memory = 0
        self._order: Sequence[int | None] = ()

    def add(self, prompt: Prompt) -> int:
        """Write a prompt and return its number."""
        rest = prompt.history, prompt.tokens, prompt.arguments
        tokens = None if prompt.tokens is None else prompt.tokens.tobytes()
        name_of_rest = hash((3, prompt.history, tokens, orjson.dumps(dict(prompt.arguments))))
        self._parts.append(self._number(hash((0, orjson.dumps(prompt.tools))), prompt.tools))
        self._parts.append(
            self._number(hash((1, orjson.dumps(prompt.documents))), prompt.documents)
        )
        self._parts.append(self._number(name_of_rest, rest))
        for message in prompt.messages:
            number: int | None = message.memo.get(self._file)
            if number is None:
                fields = orjson.dumps(dict(message.fields)) if message.fields else b""
                name = hash((2, message.path, message.role, message.blocks, fields))
                number = message.memo[self._file] = self._number(name, message)
            self._parts.append(number)
        self._starts.append(len(self._parts))
        return len(self._starts) - 2

    def select(self, numbers: Sequence[int | None]) -> None:
        """Give the prompts to requests; a request without a prompt has None."""
        self._order = numbers
        self._names.clear()
        self._file.flush()

    def clear(self) -> None:
        """Forget all prompts, since the log is read again."""
        self._file.close()
        self.__init__()  # type: ignore[misc]

    @property
    def are_known(self) -> bool:
        """Whether a request has a prompt."""
        return len(self._starts) > 1

    def release(self) -> None:
        """Let go of the parts in memory, with all that was computed of them."""
        self._objects.clear()
        self._in_memory = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Prompt | None]:
        return (self[request] for request in range(len(self)))

    @overload
    def __getitem__(self, request: int) -> Prompt | None: ...
    @overload
    def __getitem__(self, request: slice) -> list[Prompt | None]: ...
    def __getitem__(self, request: int | slice) -> Prompt | list[Prompt | None] | None:
        if isinstance(request, slice):
            return [self[each] for each in range(*request.indices(len(self)))]
        number = self._order[request]
        if number is None:
            return None
        numbers = self._parts[self._starts[number] : self._starts[number + 1]]
        objects = self._objects
        parts: list[Any] = list(map(objects.get, numbers))
        for each in filter(objects.__contains__, numbers):
            objects.move_to_end(each)
        if None in parts:
            parts = [
                self._read(each) if read is None else read
                for read, each in zip(parts, numbers, strict=True)
            ]
        tools, documents, (history, tokens, arguments) = parts[:_APART]
        return Prompt(tuple(parts[_APART:]), tools, documents, history, tokens, arguments)

    def _number(self, name: int, content: Any) -> int:
        """Return the number of a part of a prompt, which is written if it is new."""
        number = self._names.get(name)
        if number is None:
            number = len(self._places) - 1
            try:
                size = self._file.write(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
            except OSError as error:
                where = f"TMPDIR={tempfile.gettempdir()}"
                raise ValueError(
                    f"{where}: expected room for the prompts of the log, but {error.strerror}"
                ) from error
            self._places.append(self._places[-1] + size)
            self._names[name] = number
            if len(self._names) > _NAMES_IN_MEMORY:
                self._names.popitem(last=False)
        return number

    def _read(self, number: int) -> Any:
        first, stop = self._places[number : number + 2]
        # forks share a file's position
        content = pickle.loads(os.pread(self._file.fileno(), stop - first, first))
        self._objects[number] = content
        self._in_memory += stop - first
        while self._in_memory > _BYTES_IN_MEMORY and len(self._objects) > 1:
            oldest, _ = self._objects.popitem(last=False)
            self._in_memory -= self._places[oldest + 1] - self._places[oldest]
        return content


# ------------------------------------------------------------------------------
# Prompts of a log as bodies of chat completions, one per line: a mended log, which a server can be
# asked again.
# ------------------------------------------------------------------------------

#: Fields of a body that name a part of a cache identity, as `identity_of` reads them.
_IDENTITY = {
    "model": "model",
    "adapter": "lora_name",
    "salt": "cache_salt",
    "rank": "data_parallel_rank",
    "media": "mm_hashes",
}


def write_log(log: Log, rewrite: Rewrite, path: Path) -> int:
    """Write the requests of a log with changed prompts as JSON lines of the format `openai`; return
    their number.

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
            line["output_length"] = output = int(log.output_lens[request])
            line["body"] = body | ({"max_tokens": output} if output else {})
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, write)
    return len(written)


def body_of(prompt: Prompt, *, has_template: bool = False) -> dict[str, Any]:
    """Return the body of a request that reads as this prompt; `has_template`: a template reads its
    arguments."""
    body: dict[str, Any] = {}
    if prompt.tokens is not None:
        return {"prompt": prompt.tokens.tolist()}
    if prompt.messages and prompt.messages[0].path == "prompt" and not prompt.messages[0].role:
        body["prompt"] = "".join(
            block for block in prompt.messages[0].blocks if isinstance(block, str)
        )
    else:
        apart = [message for message in prompt.messages if not message.role]
        if apart:
            body["system"] = [_block(block) for message in apart for block in message.blocks]
        body["messages"] = []
        for message in prompt.messages:
            if not message.role:
                continue
            blocks = message.blocks
            is_text = len(blocks) < 2 and all(isinstance(block, str) for block in blocks)
            content = "".join(map(str, blocks)) if is_text else [_block(block) for block in blocks]
            body["messages"].append({"role": message.role, "content": content, **message.fields})
    if prompt.tools:
        body["tools"] = list(prompt.tools)
    if prompt.documents:
        body["documents"] = list(prompt.documents)
    if prompt.history is not None:
        body |= (
            {"prompt": prompt.history.block}
            if prompt.history.kind == "prompt"
            else prompt.history.block
        )
    if has_template and prompt.arguments:
        body["chat_template_kwargs"] = dict(prompt.arguments)
    return body


def _block(block: str | Opaque) -> Mapping[str, Any]:
    return {"type": "text", "text": block} if isinstance(block, str) else block.block
