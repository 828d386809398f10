"""Messages of Gemini and of Bedrock's Converse as messages with typed blocks, which all other
interfaces have.

Both name a block by the key of its content. Gemini's `contents` have `parts`, and its names come in
two spellings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from spanlab.workloads.logs.rows import BadFieldError, actual

Block = dict[str, Any]


def _text(text: Any) -> Block:
    return {"type": "text", "text": text}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


# ------------------------------------------------------------------------------
# Bedrock's Converse: blocks without a type, each with one key.
# ------------------------------------------------------------------------------


_KINDS: tuple[str, ...] = (
    "cachePoint",
    "citationsContent",
    "document",
    "guardContent",
    "image",
    "reasoningContent",
    "toolResult",
)
_KINDS += ("toolUse", "video", "audio")


def typed_blocks(content: Any) -> Any:
    """Return a content with a type in each block, without marks of caches; a content that has types
    is the same."""
    if not isinstance(content, list) or not any(map(_is_untyped, content)):
        return content
    blocks = ([block] if not _is_untyped(block) else _typed(block) for block in content)
    return [block for several in blocks for block in several]


def _is_untyped(block: Any) -> bool:
    return (
        isinstance(block, dict) and "type" not in block and not isinstance(block.get("text"), str)
    )


def _typed(block: Mapping[str, Any]) -> list[Block]:
    """Return a block of Converse with its type; none for a mark of a cache."""
    given = [key for key, value in block.items() if value is not None]
    named = next((key for key in given if key in _KINDS), None)
    kind = named or next(
        (key for key in given if isinstance(block[key], dict)), given[0] if given else "unknown"
    )
    inner = block.get(kind)
    if kind == "cachePoint":
        return []
    if not isinstance(inner, dict):
        return [{"type": kind, **block}]
    if kind == "toolUse":
        return [
            {
                "type": "tool_use",
                "id": inner.get("toolUseId"),
                "name": inner.get("name"),
                "input": inner.get("input"),
            }
        ]
    if kind == "toolResult":
        content = [
            _text(_as_text(piece["json"])) if isinstance(piece, dict) and "json" in piece else piece
            for piece in _as_list(inner.get("content"))
        ]
        return [
            {
                "type": "tool_result",
                "tool_use_id": inner.get("toolUseId"),
                "content": typed_blocks(content),
            }
        ]
    if kind == "reasoningContent" and "reasoningText" in inner:
        return [{"type": "thinking", "thinking": _inner_text(inner["reasoningText"])}]
    if kind == "reasoningContent":
        return [{"type": "redacted_thinking", "data": inner.get("redactedContent")}]
    if kind == "guardContent":
        return typed_blocks([inner if "text" not in inner else _text(_inner_text(inner["text"]))])  # type: ignore[no-any-return]
    if kind == "citationsContent":
        return [_text(_inner_text(piece)) for piece in _as_list(inner.get("content"))]
    if kind == "image":
        return [{"type": "image", "source": _source(inner, "image/")}]
    if kind == "document":
        return [_document(inner)]
    return [{"type": kind, **inner} if "type" not in inner else {"type": kind, kind: inner}]


def _inner_text(piece: Any) -> str:
    """Return the text of an object with one, which some programs write as the text itself."""
    text = piece.get("text") if isinstance(piece, dict) else piece
    return _as_text(text or "")


def _document(document: Mapping[str, Any]) -> Block:
    source = document.get("source")
    beside = {"title": document.get("name"), "context": document.get("context")}
    if isinstance(source, dict) and isinstance(source.get("text"), str):
        return {"type": "document", "source": {"type": "text", "data": source["text"]}, **beside}
    if isinstance(source, dict) and isinstance(source.get("content"), list):
        return {
            "type": "document",
            "source": {"type": "content", "content": source["content"]},
            **beside,
        }
    return {"type": "document", "source": _source(document, ""), **beside}


def _source(media: Mapping[str, Any], family: str) -> Block:
    source, kind = media.get("source"), f"{family}{media.get('format')}"
    if isinstance(source, dict) and isinstance(source.get("bytes"), str):
        return {"type": "base64", "media_type": kind, "data": source["bytes"]}
    return {"type": "reference", "media_type": kind, "source": source}


def converse_tools(config: Any) -> Iterator[Any]:
    """Yield the tools of `toolConfig` in the form of Anthropic; Gemini has another `toolConfig`,
    without tools."""
    tools = config.get("tools") if isinstance(config, dict) else None
    for tool in tools if isinstance(tools, list) else ():
        spec = tool.get("toolSpec") if isinstance(tool, dict) else None
        if isinstance(spec, dict):
            schema = spec.get("inputSchema")
            inner = schema.get("json", schema) if isinstance(schema, dict) else schema
            named = {key: spec[key] for key in ("name", "description") if spec.get(key) is not None}
            yield named if inner is None else {**named, "input_schema": inner}
        elif not (isinstance(tool, dict) and "cachePoint" in tool):
            yield tool


# ------------------------------------------------------------------------------
# Gemini: contents with parts, in names with capitals or with underscores.
# ------------------------------------------------------------------------------

# results of functions become messages of their own
_ROLES = {"model": "assistant", "function": "user", "tool": "user"}
_FAMILIES = {"image": "image", "audio": "audio", "video": "video"}


def _either(piece: Mapping[str, Any], name: str) -> Any:
    """Return a field whose name has capitals or underscores."""
    value = piece.get(name)
    if value is None:
        value = piece.get(
            "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
        )
    return value


def system_of_gemini(body: Mapping[str, Any]) -> Any:
    """Return the system instruction as blocks; None if the body has none."""
    content = _either(body, "systemInstruction")
    return None if content is None else _blocks_of(content, "systemInstruction")


def contents_of(contents: Any) -> list[Any]:
    """Return the elements of `contents`, of which libraries of Google take a single one, or a text,
    too."""
    if not isinstance(contents, list):
        contents = [contents]
    if not contents or not all(isinstance(content, (str, dict)) for content in contents):
        raise BadFieldError("contents", f"a list of objects with role and parts{actual(contents)}")
    return [{"parts": [_text(each)]} if isinstance(each, str) else each for each in contents]


def message_of_gemini(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an element of `contents` as a message with typed blocks."""
    role = content.get("role") or "user"
    if not isinstance(role, str):
        raise BadFieldError("contents.role", f"user or model{actual(role)}")
    beside = {key: value for key, value in content.items() if key not in ("role", "parts")}
    if "parts" not in content and not beside.keys() <= {"metadata"}:  # a part in place of a content
        return {"role": "user", "content": list(_blocks_of_part(content))}
    return {"role": _ROLES.get(role, role), "content": _blocks_of(content, "contents"), **beside}


def _blocks_of(content: Any, name: str) -> list[Any]:
    if isinstance(content, dict) and "parts" in content:
        content = content["parts"]
    parts = content if isinstance(content, list) else [content]
    blocks: list[Any] = []
    for piece in parts:
        if piece is None:
            continue
        if not isinstance(piece, (str, dict)):
            raise BadFieldError(f"{name}.parts", f"a list of objects{actual(piece)}")
        blocks += [_text(piece)] if isinstance(piece, str) else _blocks_of_part(piece)
    return blocks


def _blocks_of_part(piece: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the block of a part, behind its signature: the encrypted thoughts before it, which
    count as input."""
    signature = _either(piece, "thoughtSignature")
    if signature:
        yield {"type": "redacted_thinking", "data": signature}
    text = piece.get("text")
    call = _either(piece, "functionCall")
    answer = _either(piece, "functionResponse")
    data, file = _either(piece, "inlineData"), _either(piece, "fileData")
    if isinstance(text, str):
        yield (
            {"type": "thinking", "thinking": text} if piece.get("thought") is True else _text(text)
        )
    elif isinstance(call, dict):
        yield {
            "type": "tool_use",
            "id": _name_of(call),
            "name": call.get("name"),
            "input": call.get("args"),
        }
    elif isinstance(answer, dict):
        more = [
            block
            for inner in _as_list(answer.get("parts"))
            for block in _blocks_of(inner, "functionResponse")
        ]
        text = _text(_as_text(answer.get("response", "")))
        yield {"type": "tool_result", "tool_use_id": _name_of(answer), "content": [text, *more]}
    elif isinstance(data, dict):
        kind = _either(data, "mimeType")
        source = {"type": "base64", "media_type": kind, "data": data.get("data")}
        yield {"type": _family(kind), "source": source}
    elif isinstance(file, dict):
        kind = _either(file, "mimeType")
        yield {
            "type": _family(kind),
            "source": {"type": "url", "media_type": kind, "url": _either(file, "fileUri")},
        }
    else:
        kind = next(
            (key for key, value in piece.items() if value is not None and key not in _BESIDE), None
        )
        if kind is not None:
            yield {"type": kind, kind: piece[kind]}


#: Fields beside the content of a part.
_BESIDE = (
    "thought",
    "thoughtSignature",
    "thought_signature",
    "videoMetadata",
    "video_metadata",
    "partMetadata",
    "type",
)


def _name_of(function: Mapping[str, Any]) -> Any:
    """Return the id of a call, or the name of its function, which pairs calls with answers where
    ids are missing."""
    name = function.get("id")
    return function.get("name") if name is None else name


def _family(kind: Any) -> str:
    return _FAMILIES.get(str(kind).partition("/")[0], "document")


def gemini_tools(tools: Any) -> Iterator[Any]:
    """Yield declarations of functions, and other tools as they are."""
    for tool in _as_list(tools):
        declared = _either(tool, "functionDeclarations") if isinstance(tool, dict) else None
        if isinstance(declared, list):
            yield from declared
            names = ("functionDeclarations", "function_declarations")
            tool = {
                key: value for key, value in tool.items() if key not in names and value is not None
            }
        if tool:
            yield tool


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
