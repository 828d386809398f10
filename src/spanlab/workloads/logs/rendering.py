"""The parts of a prompt in the order in which a server renders them, and their pieces.

Without a template, tools, system prompt, documents and messages are parts; what a template adds is
unknown. With a tokenizer's chat template, the prompt is the text that it renders, cut only at parts
that are no text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import orjson

from spanlab.queries.render import ChatTokenizer
from spanlab.workloads.logs.bodies import (
    PATCH,
    Block,
    BodyParser,
    Message,
    Opaque,
    Prompt,
    as_json,
    tools_text,
)
from spanlab.workloads.logs.log import Ints, Keys, hash_pieces
from spanlab.workloads.logs.rows import BadFieldError
from spanlab.workloads.logs.source import LogFile

TEMPLATE = (
    "what a chat template adds to messages is unknown, and left out; workload.log.template=FOLDER renders the template "
    "of a tokenizer"
)
TOOLS = {
    "first": "tools stand before the system prompt; workload.log.tools=after_system puts them behind it, as Qwen3 does",
    "after_system": "tools stand behind the system prompt; workload.log.tools=first puts them before it",
}
UNKNOWN_TOKENS = 1  # a part of unknown length separates prompts, and counts as one token
_MEMO_SIZE = 4096  # recently hashed texts: a conversation repeats its messages
# of which the pieces of the last prompt are in memory, since the next one may go on from it
_CONVERSATIONS = 64
# private characters, which stand for parts that are no text
_FIRST_MARKER, _LAST_MARKER = 0xF0000, 0x10FFFF
_MARKER = re.compile(f"([{chr(_FIRST_MARKER)}-{chr(_LAST_MARKER)}])")


@dataclass(frozen=True)
class BodyOptions:
    """How the bodies of a log are rendered.

    `tools`         their position without a template: first, or after_system
    `image_tokens`  tokens of each image; None: by its size, otherwise unknown
    `not_rendered`  further keys of bodies that no server renders
    `template`      tokenizer with the chat template that renders the prompts
    """

    tools: str = "first"
    image_tokens: int | None = None
    not_rendered: tuple[str, ...] = ()
    template: ChatTokenizer | None = None


class Section(NamedTuple):
    """A part of a prompt.

    `path`     where it stands in the body
    `content`  its text, its token ids, or what it is instead
    `role`     of its message, which is the first line of the message's first section; empty where
               there is none
    """

    path: str
    content: Block | Ints
    role: str = ""


class Pieces(NamedTuple):
    """Pieces of a prompt: keys, lengths, and indexes of those that begin a span after the first.

    `prompt`  its number among the prompts of the log; None if these are not wanted
    """

    keys: Keys
    lengths: Ints
    opens: tuple[int, ...]
    prompt: int | None = None


class _Joined(NamedTuple):
    """Pieces of a prompt, and where its parts end in them.

    `elements`  its parts, and `spans` the number of spans up to the end of each
    `pieces`    keys and lengths, shape (2, pieces), and `ends` of the spans in them
    """

    elements: Sequence[Section | Message]
    spans: list[int]
    pieces: Ints
    ends: list[int]

    def same(self, elements: Sequence[Section | Message]) -> int:
        """Return how many first parts of another prompt are the same objects, or have the same
        text."""
        for index, (earlier, later) in enumerate(zip(self.elements, elements, strict=False)):
            is_text = (
                isinstance(earlier, Section)
                and isinstance(later, Section)
                and earlier.content is later.content
            )
            if earlier is not later and not is_text:
                return index
        return min(len(self.elements), len(elements))


_NOTHING = _Joined((), [], np.zeros((2, 0), dtype=np.int64), [])


def sections_of(prompt: Prompt, options: BodyOptions) -> list[Section]:
    """Return the parts of a prompt in rendered order."""
    return [
        section
        for element in _in_order(prompt, options)
        for section in (_message_sections(element) if isinstance(element, Message) else [element])
    ]


def _in_order(prompt: Prompt, options: BodyOptions) -> Sequence[Section | Message]:
    """Return messages whole, and the other parts of a prompt as sections, in rendered order."""
    if prompt.tokens is not None:
        return [Section("prompt", prompt.tokens, "prompt")]
    history = [] if prompt.history is None else [Section(prompt.history.kind, prompt.history)]
    if options.template is not None and not (
        prompt.messages and prompt.messages[0].path == "prompt"
    ):
        return history + _rendered(prompt, options.template)
    system = 0
    while system < len(prompt.messages) and prompt.messages[system].is_system:
        system += 1
    tools = [Section("tools", tools_text(prompt.tools), "tools")] if prompt.tools else []
    lead, others = prompt.messages[:system], prompt.messages[system:]
    texts = [each if isinstance(each, str) else as_json(each) for each in prompt.documents]
    documents = [Section("documents", text, "documents") for text in texts]
    front: tuple[Section | Message, ...] = (
        (*tools, *lead) if options.tools == "first" else (*lead, *tools)
    )
    return [*history, *front, *documents, *others]


def _message_sections(message: Message) -> list[Section]:
    role = "system" if message.is_system else message.role or message.path
    return [Section(message.path, block, role) for block in message.rendered]


def _rendered(prompt: Prompt, tokenizer: ChatTokenizer) -> list[Section]:
    """Return the text that a template renders, cut at the parts that are no text."""
    opaque: list[Opaque] = []
    takes_lists = _takes_lists(tokenizer)
    messages = [_for_template(message, opaque, takes_lists) for message in prompt.messages]
    variables = {
        "add_generation_prompt": True,
        "tools": [_tool_for_template(tool) for tool in prompt.tools] or None,
        "documents": list(prompt.documents) or None,
        **prompt.arguments,
    }
    try:
        text = tokenizer.template.render(messages, variables)
    except ValueError as error:
        raise BadFieldError("messages", f"a chat that the template renders: {error}") from error
    sections: list[Section] = []
    for piece in _MARKER.split(text):
        number = ord(piece) - _FIRST_MARKER if len(piece) == 1 else -1
        if 0 <= number < len(opaque):
            sections.append(Section("rendered prompt", opaque[number], "rendered"))
        elif piece:
            sections.append(Section("rendered prompt", piece, "rendered"))
    return sections


@lru_cache(maxsize=8)
def _takes_lists(tokenizer: ChatTokenizer) -> bool:
    """Return whether a template reads contents that are lists of blocks; others get one text,
    joined by line ends."""
    mark = chr(_FIRST_MARKER)
    probe = [{"role": "user", "content": [{"type": "text", "text": mark}]}]
    try:
        text = tokenizer.template.render(probe, {"add_generation_prompt": True})
    except ValueError:
        return False
    return mark in text and "'type'" not in text and '"type"' not in text


def _for_template(message: Message, opaque: list[Opaque], takes_lists: bool) -> dict[str, Any]:
    """Return a message as templates get it: calls with parsed arguments, and a marker for each part
    that is no text."""
    texts = []
    for block in message.blocks:
        if isinstance(block, Opaque):
            texts.append(chr(_FIRST_MARKER + len(opaque)))
            opaque.append(block)
        else:
            texts.append(block)
    content: Any = (
        [{"type": "text", "text": text} for text in texts] if takes_lists else "\n".join(texts)
    )
    if len(texts) < 2:
        content = "".join(texts)
    fields = dict(message.fields)
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_call_for_template(call) for call in fields["tool_calls"]]
    return {
        "role": message.role or ("system" if message.is_system else "user"),
        "content": content,
        **fields,
    }


def _call_for_template(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _tool_for_template(tool: Any) -> Any:
    """Return a tool's definition in the form of chat completions."""
    if not isinstance(tool, Mapping) or isinstance(tool.get("function"), Mapping):
        return tool
    function = {key: value for key, value in tool.items() if key not in ("type", "input_schema")}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


class BodyReader:
    """Pieces of the prompts in the bodies of a log, with a memo of recent texts.

    `repeats`  whether bodies share the objects of their messages, which are then parsed once
    """

    def __init__(self, file: LogFile, *, repeats: bool = False) -> None:
        self._file, self._options, self._repeats = file, file.bodies or BodyOptions(), repeats
        self._known = OrderedDict[int, Ints]()
        self._latest = OrderedDict[tuple[str, int], _Joined]()

    @cached_property
    def _parser(self) -> BodyParser:
        options = self._options
        return BodyParser(
            self._file.unread,
            options.image_tokens,
            frozenset(options.not_rendered),
            options.template is not None,
            self._repeats,
        )

    def pieces(
        self, body: Mapping[str, Any], *, is_line: bool, repeats: bool | None = None
    ) -> Pieces:
        """Return the pieces of a body's prompt; `is_line`: the body is the line itself, with the
        log's keys in it.

        `repeats`  whether this body shares objects, where bodies of the log differ in it
        """
        self._parser.repeats = self._repeats if repeats is None else repeats
        prompt = self._parser.parse(body, is_line=is_line)
        number = None if self._file.prompts is None else self._file.prompts.add(prompt)
        return self.pieces_of(prompt)._replace(prompt=number)

    def pieces_of(self, prompt: Prompt, change: str = "") -> Pieces:
        """Return the pieces of a prompt; `change` names what changed it, so that it goes on from
        such prompts."""
        notes = self._file.notes
        if (
            self._options.template is None
            and prompt.messages
            and prompt.messages[0].path != "prompt"
        ):
            _add(notes, TEMPLATE)
            if prompt.tools:
                _add(notes, TOOLS[self._options.tools])
        joined = self._joined(_in_order(prompt, self._options), change)
        if not joined.ends:
            raise BadFieldError("messages", "a message with content")
        keys, lengths = joined.pieces
        return Pieces(keys, lengths, tuple(joined.ends[:-1]))

    def _joined(self, elements: Sequence[Section | Message], change: str) -> _Joined:
        """Return the pieces of a prompt behind those that it has in common with the last prompt
        that began alike."""
        begin = (
            change,
            id(
                next(
                    (each for each in elements if isinstance(each, Message) and not each.is_system),
                    None,
                )
            ),
        )
        before = self._latest.pop(begin, _NOTHING)
        same = before.same(elements)
        count = before.spans[same - 1] if same else 0
        more = [self._spans(element) for element in elements[same:]]
        further = [span for spans in more for span in spans]
        stop = before.ends[count - 1] if count else 0
        joined = _Joined(
            elements,
            before.spans[:same] + list(accumulate(map(len, more), initial=count))[1:],
            np.concatenate([before.pieces[:, :stop], *further], axis=1),
            before.ends[:count]
            + list(accumulate([span.shape[1] for span in further], initial=stop))[1:],
        )
        self._latest[begin] = joined  # which keeps the id of its first message
        if len(self._latest) > _CONVERSATIONS:
            self._latest.popitem(last=False)
        return joined

    def _spans(self, element: Section | Message) -> list[Ints]:
        """Return the pieces of each section of a part; those of a message are computed once."""
        if isinstance(element, Section):
            return [self._hash(element.content)]
        if self not in element.memo:
            element.memo[self] = [
                self._hash(section.content) for section in _message_sections(element)
            ]
        spans: list[Ints] = element.memo[self]
        return spans

    def _hash(self, content: Block | Ints) -> Ints:
        """Return keys and lengths, shape (2, pieces), of a text, of token ids, or of a part that is
        no text."""
        if isinstance(content, Opaque):
            if content.by_size:
                each = f"one for each {PATCH} x {PATCH} pixels"
                _add(self._file.notes, f"tokens of images are estimated from their size: {each}")
            elif content.tokens is not None:
                count = f"{content.tokens:,} tokens, as workload.log.image_tokens says"
                _add(self._file.notes, f"each image counts as {count}")
            tokens = UNKNOWN_TOKENS if content.tokens is None else content.tokens
            return np.array([[content.name], [tokens]], dtype=np.int64)
        if isinstance(content, np.ndarray):
            return np.stack(hash_pieces(content, self._file.piece))
        # of 64 bits, and many times faster than one that is the same in every process
        name = hash(content)
        if name not in self._known:
            template = self._options.template
            encoded = self._file.encode(content) if template is None else template.encode(content)
            self._known[name] = np.stack(hash_pieces(encoded, self._file.piece))
        self._known.move_to_end(name)
        if len(self._known) > _MEMO_SIZE:
            self._known.popitem(last=False)
        return self._known[name]


def _add(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
