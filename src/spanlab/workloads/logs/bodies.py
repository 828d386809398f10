"""Bodies of requests to LLM servers: the prompt that each contains, and what of it no reader can
count.

Chat completions, completions, Anthropic messages, OpenAI responses, Bedrock's Converse and Gemini's
contents become one form, `Prompt`. Each key of a body is rendered, known not to be rendered, or
unknown; unknown ones that hold text count as left out.
"""

from __future__ import annotations

import base64
import binascii
import json
import marshal
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import orjson

from spanlab.workloads.logs.dialects import (
    contents_of,
    converse_tools,
    gemini_tools,
    message_of_gemini,
    system_of_gemini,
    typed_blocks,
)
from spanlab.workloads.logs.log import Ints, hash_name
from spanlab.workloads.logs.observed import Unread
from spanlab.workloads.logs.rows import BadFieldError, Row

# ------------------------------------------------------------------------------
# Parts of a prompt that are no text: images, sound, files, encrypted thoughts, and histories
# kept by a server.
# ------------------------------------------------------------------------------

#: Names of parts by the type of their block; any other type is named as the block names it.
OPAQUE_TYPES = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "redacted_thinking": "encrypted reasoning",
}


def check_block(block: object, path: str) -> None:
    """Raise BadFieldError for a block of a message that is no text and no object."""
    if not isinstance(block, (str, dict)):
        raise BadFieldError(
            path, f"content as a text or a list of objects with a type, not {block!r:.40}"
        )


PATCH = 28  # pixels of a side that become one token: 14-pixel patches, merged 2 x 2
_PNG = b"\x89PNG\r\n\x1a\n"
_DATA_URL = re.compile(r"data:[^,]{0,100},")
_PNG_HEAD = 32  # characters of base64 that hold signature, IHDR, width and height


@dataclass(frozen=True)
class Opaque:
    """A part whose tokens no text gives.

    `kind`    image, audio, video, file, encrypted reasoning, previous_response_id, or the type of
              its block
    `name`    64-bit hash of its content
    `size`    bytes in the body
    `tokens`  None if unknown
    `by_size` whether the tokens follow from width and height
    `block`   the part of the body, to write it again
    """

    kind: str
    name: int
    size: int
    tokens: int | None = None
    by_size: bool = False
    block: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


def opaque_block(kind: str, block: Mapping[str, Any], image_tokens: int | None) -> Opaque:
    """Return the part that a block of a body holds; `image_tokens` are the tokens of an image, if
    they are known."""
    content = orjson.dumps(
        {key: value for key, value in block.items() if key not in ("cache_control", "id")}
    )
    name, size = hash_name(content), len(content)
    if kind != "image" or image_tokens is not None:
        return Opaque(kind, name, size, image_tokens if kind == "image" else None, block=block)
    pixels = _pixels(block)
    tokens = None if pixels is None else -(-pixels[0] // PATCH) * -(-pixels[1] // PATCH)
    return Opaque(kind, name, size, tokens, tokens is not None, block)


def _pixels(block: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return width and height of an image, from the block or from the head of a PNG in it."""
    image = block.get("image_url")
    places = [block, image if isinstance(image, dict) else {}, block.get("source") or {}]
    for path in places:
        if isinstance(path, dict):
            sides = path.get("width"), path.get("height")
            if all(type(side) is int and side > 0 for side in sides):
                return sides  # type: ignore[return-value]
    texts = [
        image,
        *(path.get(key) for path in places if isinstance(path, dict) for key in ("url", "data")),
    ]
    for text in texts:
        if isinstance(text, str) and (pixels := _png_pixels(text)):
            return pixels
    return None


def _png_pixels(text: str) -> tuple[int, int] | None:
    try:
        head = base64.b64decode(_DATA_URL.sub("", text[:200], count=1)[:_PNG_HEAD], validate=True)
    except (binascii.Error, ValueError):
        return None
    if not head.startswith(_PNG) or len(head) < 24:
        return None
    width, height = (int.from_bytes(head[start : start + 4], "big") for start in (16, 20))
    return (width, height) if width and height else None


Block = str | Opaque

PROMPT_KEYS = ("messages", "prompt", "input", "contents")
_FRONTS = ("instructions", "system", "systemInstruction", "system_instruction")
RENDERED = frozenset({*PROMPT_KEYS, *_FRONTS, "tools", "functions", "documents", "toolConfig"})
_NOT_RENDERED = """
model stream stream_options temperature top_p top_k min_p typical_p n best_of max_tokens max_completion_tokens
max_output_tokens max_tool_calls min_tokens stop stop_token_ids stop_sequences seed presence_penalty frequency_penalty
repetition_penalty length_penalty logit_bias logprobs top_logprobs prompt_logprobs user metadata store service_tier
parallel_tool_calls tool_choice function_call echo cache_salt safety_identifier prompt_cache_key prompt_cache_retention
include truncation background guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
structured_outputs priority request_id ignore_eos skip_special_tokens spaces_between_special_tokens
include_stop_str_in_output add_generation_prompt add_special_tokens return_token_ids return_tokens_as_token_ids
use_beam_search modalities audio prediction web_search_options cache_control anthropic_version anthropic_beta betas
speed inference_geo kv_transfer_params vllm_xargs lora_path lora_name data_parallel_rank extra_headers extra_query
timeout api_key api_base base_url provider route models fallbacks modelId inferenceConfig guardrailConfig
performanceConfig requestMetadata serviceTier additionalModelResponseFieldPaths schemaVersion safetySettings
safety_settings tool_config labels modelArmorConfig
"""
_ENVELOPE = """
timestamp created created_at time ts start_time startTime end_time endTime finished_at completionStartTime
completion_start_time latency latency_ms duration duration_ms ttft response responses output outputs output_text
completion choices usage usageMetadata usage_metadata meta_info error errors status status_code code id _id object
custom_id method url path endpoint headers session_id sessionId conversation_id trace_id traceId span_id parent_id
request_id tenant tenant_id user_id userId team_id api_key key_alias host ip region version environment level tags name
type output_length finish_reason stop_reason stop_sequence role content call_type model_id model_group cost spend
cache_hit cache_key litellm_call_id log_id event candidates promptFeedback modelVersion model_version responseId
response_id key stopReason metrics
"""
_AROUND_MESSAGES = """
role content id type status object created created_at timestamp cache_control annotations audio model phase stop_reason
stop_sequence usage parsed
"""
#: Keys that select how an answer is made, or say who asks: no server writes them into the prompt.
NOT_RENDERED = frozenset(_NOT_RENDERED.split())
#: Keys of a server's state that the body only names.
HISTORY = ("previous_response_id", "conversation", "cachedContent", "cached_content")
#: Keys with parameters of Bedrock and Gemini, and those in them that are known not to be rendered.
PARAMETERS = ("additionalModelRequestFields", "generationConfig", "generation_config", "config")
_IN_PARAMETERS = """
anthropic_beta stopSequences responseMimeType response_mime_type responseModalities response_modalities thinkingConfig
thinking_config speechConfig speech_config imageConfig image_config mediaResolution media_resolution routingConfig
routing_config modelSelectionConfig safety_settings tool_config automatic_function_calling http_options labels
tools system_instruction cached_content
"""
_NOT_RENDERED_INSIDE = frozenset(_IN_PARAMETERS.split())
#: Keys whose effect on the prompt is the template's: it renders them, or nobody does.
OF_TEMPLATE = frozenset({"chat_template_kwargs", "reasoning_effort", "response_format"})
#: Keys of the line around a body, where both share one object.
ENVELOPE = frozenset(_ENVELOPE.split())
#: In the order in which they count as rendered: thoughts come before calls.
_MESSAGE_FIELDS = (
    "name",
    "reasoning_content",
    "reasoning",
    "thinking",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
)
_MESSAGE_ENVELOPE = frozenset(_AROUND_MESSAGES.split())
_TEXT_TYPES = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "summary_text": "text",
} | {"reasoning_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, eq=False)
class Message:
    """One message of a prompt.

    `path`    where it stands in the body: system, messages[3], input[0]
    `role`     empty where the body gives no role
    `blocks`   texts, and parts that no text represents
    `fields`   further fields that templates render, such as tool_calls
    """

    path: str
    role: str
    blocks: tuple[Block, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_system(self) -> bool:
        """Whether the message belongs to the system prompt."""
        return self.role in ("system", "developer") or self.path in ("system", "instructions")

    def __reduce__(self) -> tuple[Any, ...]:
        # what was computed of it stays behind
        return Message, (self.path, self.role, self.blocks, self.fields)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What others computed of the message, by the object that did."""
        return {}

    @cached_property
    def rendered(self) -> tuple[Block, ...]:
        """Its blocks as a prompt has them: the role precedes the first, and further fields follow
        the last."""
        blocks = list(self.blocks) or [""]
        if self.role:
            head = f"{self.role}\n"
            blocks = (
                [head + blocks[0], *blocks[1:]] if isinstance(blocks[0], str) else [head, *blocks]
            )
        if self.fields:
            fields, last = orjson.dumps(dict(self.fields)).decode(), blocks[-1]
            blocks = [*blocks[:-1], last + fields] if isinstance(last, str) else [*blocks, fields]
        return tuple(block for block in blocks if block != "")


@dataclass(frozen=True, eq=False)
class Prompt:
    """The prompt of a body.

    `messages`   the system prompt first, if the body keeps it apart
    `tools`      definitions of tools as the body holds them, without marks for caches
    `documents`  passages that a template renders
    `history`    a part in front that the body names and does not hold
    `tokens`     token ids in place of messages
    `arguments`  variables of the template
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()
    documents: tuple[Any, ...] = ()
    history: Opaque | None = None
    tokens: Ints | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opaque(self) -> Iterator[Opaque]:
        """Yield the parts that no text represents."""
        if self.history is not None:
            yield self.history
        for message in self.messages:
            yield from (block for block in message.blocks if isinstance(block, Opaque))


Rewrite = Callable[[Prompt], Prompt]


def is_body(value: Any) -> bool:
    """Return whether an object is the body of a request."""
    if not isinstance(value, dict):
        return False
    if value.get("messages") is not None or value.get("prompt") is not None or is_gemini(value):
        return True
    items = value.get("input")
    named = "model" in value or "instructions" in value
    return named and (
        isinstance(items, str)
        or (
            isinstance(items, list)
            and all(isinstance(item, dict) and ({"role", "type"} & set(item)) for item in items)
        )
    )


def is_gemini(value: Mapping[str, Any]) -> bool:
    """Return whether an object has the contents of a request to Gemini."""
    contents = value.get("contents")
    listed = contents if isinstance(contents, list) else [contents]
    if any(isinstance(content, dict) and "parts" in content for content in listed):
        return True
    # of libraries
    texts = (content.get("text") if isinstance(content, dict) else content for content in listed)
    return "model" in value and any(isinstance(text, str) for text in texts)


_BY_VALUE = 2  # version of marshal without references: equal values have equal bytes, in a fraction of JSON's time
_MEMO_BYTES = 1 << 24  # of recently parsed messages, as JSON


class _Parsed(NamedTuple):
    """What an element of a list of messages became.

    `element`   the element, which keeps its id while it is in memory; None where its bytes name it
    `messages`  one for each result of a tool in it, and the rest of it
    `size`      its bytes as JSON
    """

    element: Any
    messages: list[Message]
    size: int


@dataclass
class BodyParser:
    """Parser of bodies, which counts what it reads and leaves out.

    A message that comes again at the same place of a body is parsed once, and gives the same
    objects.

    `unread`         the counts
    `image_tokens`   tokens of each image; None: by its size where the body holds it, otherwise
                     unknown
    `not_rendered`   further keys that are known not to be rendered
    `has_template`   whether a chat template renders the prompt, so that the template decides about
                     its arguments
    `repeats`        whether bodies share the objects of their messages, which are then known
                     without their bytes
    """

    unread: Unread
    image_tokens: int | None = None
    not_rendered: frozenset[str] = frozenset()
    has_template: bool = False
    repeats: bool = False
    _memo: OrderedDict[tuple[str, int, int], _Parsed] = field(default_factory=OrderedDict)
    _bytes_in_memory: int = 0

    def parse(self, body: Mapping[str, Any], *, is_line: bool) -> Prompt:
        """Return the prompt of a body; `is_line`: the body is the line itself, with the log's own
        keys in it.

        Raises BadFieldError for an invalid prompt.
        """
        prompt, sizes = self._prompt(body)
        given = body.get("chat_template_kwargs")
        arguments = {
            key: body[key] for key in ("reasoning_effort", "add_generation_prompt") if key in body
        }
        prompt = replace(prompt, arguments=arguments | (given if isinstance(given, dict) else {}))
        # bytes by key of the values that hold text and might be rendered
        parameters = {key: body[key] for key in PARAMETERS if isinstance(body.get(key), dict)}
        unknown = {
            key: _size(value)
            for key, value in body.items()
            if key not in self._known
            and key not in parameters
            and not (is_line and key in ENVELOPE)
            and _holds_text(value)
        }
        unknown |= {
            f"{key}.{name}": _size(value)
            for key, values in parameters.items()
            for name, value in values.items()
            if name not in self._known and name not in _NOT_RENDERED_INSIDE and _holds_text(value)
        }
        inner = [*prompt.opaque]
        for section in inner:
            if section.tokens is None:
                unknown[section.kind] = unknown.get(section.kind, 0) + section.size
        given_keys = [key for key in RENDERED if body.get(key) is not None]
        rendered = sum(sizes[key] if key in sizes else _size(body[key]) for key in given_keys)
        self.unread.take(
            max(0, rendered - sum(section.size for section in inner if section.tokens is None))
        )
        for key, size in unknown.items():
            self.unread.leave(key, size)
        self.unread.finish(endless=any(section.tokens is None for section in inner))
        return prompt

    @cached_property
    def _known(self) -> frozenset[str]:
        return RENDERED.union(
            NOT_RENDERED, HISTORY, self.not_rendered, OF_TEMPLATE if self.has_template else ()
        )

    def _prompt(self, body: Mapping[str, Any]) -> tuple[Prompt, dict[str, int]]:
        """Return the prompt of a body, and by key the bytes of its messages as JSON."""
        if body.get("contents") is not None and not any(
            body.get(key) for key in ("messages", "prompt", "input")
        ):
            # a request to Gemini, whose libraries keep all but the contents in `config`
            config = body.get("config")
            body = {**config, **body} if isinstance(config, dict) else body
            system = system_of_gemini(body)
            first: tuple[Message, ...] = (
                ()
                if system is None
                else (Message("system", "", self._blocks(system, "system")[0]),)
            )
            others, sizes = self._parsed(
                contents_of(body["contents"]),
                "contents",
                lambda content, path: self._message(message_of_gemini(content), path),
            )
            return Prompt(
                first + others, tuple(gemini_tools(body.get("tools"))), (), _history(body)
            ), sizes
        given = [tool for key in ("tools", "functions") for tool in _listed(body, key)]
        # without `cache_control`, which marks where a cache ends
        tools = tuple(
            {key: value for key, value in tool.items() if key != "cache_control"}
            if isinstance(tool, dict)
            else tool
            for tool in (*given, *converse_tools(body.get("toolConfig")))
        )
        documents = tuple(_listed(body, "documents"))
        if body.get("messages") is not None:
            first = self._system(body, "system")
            others, sizes = self._messages(body["messages"], "messages")
        elif body.get("prompt") is not None and body.get("input") is None:
            return self._completion(body["prompt"])
        else:
            first, items = self._system(body, "instructions"), body["input"]
            if isinstance(items, str):
                others, sizes = (Message("input", "user", (items,)),), {}
            else:
                others, sizes = self._parsed(items, "input", self._item)
        return Prompt(first + others, tools, documents, _history(body)), sizes

    def _completion(self, prompt: Any) -> tuple[Prompt, dict[str, int]]:
        if isinstance(prompt, str):
            return Prompt((Message("prompt", "", (prompt,)),)), {}
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return Prompt(tokens=Row({"prompt": prompt}).counts("prompt")), {}
        if (
            isinstance(prompt, list)
            and prompt
            and all(isinstance(message, dict) for message in prompt)
        ):
            messages, sizes = self._messages(prompt, "prompt")
            return Prompt(messages), sizes
        raise BadFieldError("prompt", "a text, token ids or a list of messages")

    def _system(self, body: Mapping[str, Any], key: str) -> tuple[Message, ...]:
        content = body.get(key)
        if content is None:
            return ()
        return (Message(key, "", self._blocks(content, key)[0]),)

    def _messages(self, messages: Any, key: str) -> tuple[tuple[Message, ...], dict[str, int]]:
        if not isinstance(messages, list) or not messages:
            raise BadFieldError(key, "a list of messages, or prompt as text or token ids")
        if not all(isinstance(message, dict) for message in messages):
            raise BadFieldError(key, "a list of objects with role and content")
        return self._parsed(messages, key, self._message)

    def _parsed(
        self, elements: list[Any], key: str, parse: Callable[[Any, str], list[Message]]
    ) -> tuple[tuple[Message, ...], dict[str, int]]:
        """Return the messages of a list under a key of a body, and by this key its bytes as
        JSON."""
        messages, size, memo = list[Message](), 1 + max(1, len(elements)), self._memo
        for index, element in enumerate(elements):
            name = (
                key,
                index,
                id(element) if self.repeats else hash(marshal.dumps(element, _BY_VALUE)),
            )
            parsed = memo.get(name)
            if parsed is not None:
                memo.move_to_end(name)
            else:
                length, places = _size(element), self.unread.places.total()
                parsed = _Parsed(
                    element if self.repeats else None, parse(element, f"{key}[{index}]"), length
                )
                if self.unread.places.total() == places:  # else each time is counted
                    memo[name] = parsed
                    self._bytes_in_memory += length
                    while self._bytes_in_memory > _MEMO_BYTES:
                        self._bytes_in_memory -= memo.popitem(last=False)[1].size
            messages += parsed.messages
            size += parsed.size
        return tuple(messages), {key: size}

    def _message(self, message: Mapping[str, Any], path: str) -> list[Message]:
        """Return a message, and one more for each result of a tool in it."""
        if not isinstance(message.get("role"), str):
            raise BadFieldError("messages", "a role in each message")
        for key, value in message.items():
            known = key in _MESSAGE_ENVELOPE or key in _MESSAGE_FIELDS or key in self.not_rendered
            if not known and _holds_text(value):
                self.unread.leave(f"{path.partition('[')[0]}[].{key}", _size(value))
        fields = {key: message[key] for key in _MESSAGE_FIELDS if message.get(key) is not None}
        content = typed_blocks(message.get("content"))
        results = [
            Message(
                path,
                "tool",
                self._blocks(block.get("content", ""), path)[0],
                _call_id(block, "tool_use_id"),
            )
            for block in (content if isinstance(content, list) else ())
            if isinstance(block, dict) and block.get("type") == "tool_result"
        ]
        blocks, more = self._blocks("" if content is None else content, path)
        if results and not blocks:
            return results
        if more:  # in one order, whatever the order of the blocks
            fields = {
                key: value
                for key in _MESSAGE_FIELDS
                if (value := (fields | more).get(key)) is not None
            }
        return [*results, Message(path, message["role"], blocks, fields)]

    def _blocks(self, content: Any, path: str) -> tuple[tuple[Block, ...], dict[str, Any]]:
        """Return the texts and opaque parts of a content, and the fields that its calls and
        thoughts become."""
        if content is None or isinstance(content, str):
            return (content or "",), {}
        content = typed_blocks(content if isinstance(content, list) else [content])
        blocks: list[Block] = []
        fields: dict[str, Any] = {}
        for block in content:
            if isinstance(block, str):
                blocks.append(block)
                continue
            check_block(block, path)
            self._add_block(block, blocks, fields)
        return tuple(blocks), fields

    def _add_block(
        self, block: Mapping[str, Any], blocks: list[Block], fields: dict[str, Any]
    ) -> None:
        kind = str(block.get("type", "text"))
        text = block.get(_TEXT_TYPES.get(kind, ""))
        source = block.get("source")
        if kind == "tool_result":  # a message of its own
            return
        if kind == "tool_use":
            call = {"name": block.get("name"), "arguments": block.get("input")}
            fields.setdefault("tool_calls", []).append(
                {"id": block.get("id"), "type": "function", "function": call}
            )
        elif kind == "thinking":
            fields["reasoning_content"] = fields.get("reasoning_content", "") + str(
                block.get("thinking") or ""
            )
        elif isinstance(text, str):
            blocks.append(text)
        elif (
            kind == "document"
            and isinstance(source, dict)
            and source.get("type") in ("text", "content")
        ):
            inner = source.get("data") if source["type"] == "text" else source.get("content")
            blocks += [str(block[key]) for key in ("title", "context") if block.get(key)]
            blocks += self._blocks(inner or "", "document")[0]
        else:
            blocks.append(opaque_block(OPAQUE_TYPES.get(kind, kind), block, self.image_tokens))

    def _item(self, item: Mapping[str, Any], path: str) -> list[Message]:
        kind = item.get("type", "message")
        if kind == "message":
            return self._message(item, path)
        if kind in ("function_call", "custom_tool_call"):
            call = {"name": item.get("name"), "arguments": item.get("arguments", item.get("input"))}
            calls = [{"id": item.get("call_id"), "type": "function", "function": call}]
            return [Message(path, "assistant", (), {"tool_calls": calls})]
        if kind in ("function_call_output", "custom_tool_call_output"):
            return [
                Message(
                    path,
                    "tool",
                    self._blocks(item.get("output", ""), path)[0],
                    _call_id(item, "call_id"),
                )
            ]
        if kind == "reasoning" and not item.get("encrypted_content"):
            texts = [
                block
                for key in ("summary", "content")
                for block in self._blocks(item.get(key) or "", path)[0]
            ]
            thoughts = "\n".join(text for text in texts if isinstance(text, str) and text)
            return (
                [Message(path, "assistant", (), {"reasoning_content": thoughts})]
                if thoughts
                else []
            )
        kind = "encrypted reasoning" if item.get("encrypted_content") else str(item.get("type"))
        return [Message(path, "assistant", (opaque_block(kind, item, None),))]


def _call_id(block: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {} if block.get(key) is None else {"tool_call_id": block[key]}


def _history(body: Mapping[str, Any]) -> Opaque | None:
    """Return the part of a prompt that a server holds and the body only names."""
    for key in HISTORY:
        if body.get(key):
            return opaque_block(key, {key: body[key]}, None)
    prompt = body.get("prompt")
    return opaque_block("prompt", prompt, None) if isinstance(prompt, dict) else None


def _listed(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadFieldError(key, f"a list, not {value!r:.40}")
    return value


def _holds_text(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    if isinstance(value, dict):
        return bool(value)
    return isinstance(value, list) and any(map(_holds_text, value))


def _size(value: Any) -> int:
    return len(orjson.dumps(value))


def as_json(value: Any) -> str:
    """Return JSON as chat templates write it."""
    return _json_text(orjson.dumps(value))


# tuples of tools that were rendered last, by id
_TOOLS = OrderedDict[int, tuple[tuple[Any, ...], str]]()
_TOOLS_IN_MEMORY = 64


def tools_text(tools: tuple[Any, ...]) -> str:
    """Return the definitions of tools as JSON; prompts that share them cost nothing more."""
    known = _TOOLS.pop(id(tools), None)
    if known is None:
        known = tools, as_json(tools)
        if len(_TOOLS) == _TOOLS_IN_MEMORY:
            _TOOLS.popitem(last=False)
    _TOOLS[id(tools)] = known
    return known[1]


@lru_cache(maxsize=256)
def _json_text(data: bytes) -> str:
    return json.dumps(orjson.loads(data), ensure_ascii=False)
