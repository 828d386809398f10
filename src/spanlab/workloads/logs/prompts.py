"""Prompts of a log in a temporary file: each message once, however many prompts repeat it.

A conversation of n calls repeats its first message n times. Later readings of the log then cost what is new in each
prompt, and texts in memory are bounded whatever the size of the log.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, overload

import orjson

from spanlab.workloads.logs.bodies import Message, Prompt

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
        self._parts.append(self._number(hash((1, orjson.dumps(prompt.documents))), prompt.documents))
        self._parts.append(self._number(name_of_rest, rest))
        self._parts.extend([self._number_of(message) for message in prompt.messages])
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
        numbers, objects = self._parts[self._starts[number] : self._starts[number + 1]], self._objects
        parts: list[Any] = list(map(objects.get, numbers))
        for each in filter(objects.__contains__, numbers):
            objects.move_to_end(each)
        if None in parts:
            parts = [self._read(each) if read is None else read for read, each in zip(parts, numbers, strict=True)]
        tools, documents, (history, tokens, arguments) = parts[:_APART]
        return Prompt(tuple(parts[_APART:]), tools, documents, history, tokens, arguments)

    def _number_of(self, message: Message) -> int:
        number: int | None = message.memo.get(self._file)
        if number is None:
            number = message.memo[self._file] = self._number(_name(message), message)
        return number

    def _number(self, name: int, content: Any) -> int:
        """Return the number of a part of a prompt, which is written if it is new."""
        number = self._names.get(name)
        if number is None:
            number = len(self._places) - 1
            try:
                size = self._file.write(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))
            except OSError as error:
                where = f"TMPDIR={tempfile.gettempdir()}"
                raise ValueError(f"{where}: expected room for the prompts of the log, but {error.strerror}") from error
            self._places.append(self._places[-1] + size)
            self._names[name] = number
            if len(self._names) > _NAMES_IN_MEMORY:
                self._names.popitem(last=False)
        return number

    def _read(self, number: int) -> Any:
        first, stop = self._places[number : number + 2]
        content = pickle.loads(os.pread(self._file.fileno(), stop - first, first))  # forks share a file's position
        self._objects[number] = content
        self._in_memory += stop - first
        while self._in_memory > _BYTES_IN_MEMORY and len(self._objects) > 1:
            oldest, _ = self._objects.popitem(last=False)
            self._in_memory -= self._places[oldest + 1] - self._places[oldest]
        return content


def _name(message: Message) -> int:
    """Return a 64-bit name of a message by its content."""
    fields = orjson.dumps(dict(message.fields)) if message.fields else b""
    return hash((2, message.path, message.role, message.blocks, fields))
