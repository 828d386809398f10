"""Parts of a prompt that are no text: images, sound, files, encrypted thoughts, and histories kept by a server."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from spanlab.workloads.logs.pieces import hash_name

#: Names of parts by the type of their block; any other type is named as the block names it.
OPAQUE_TYPES = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
    "document": "file",
    "redacted_thinking": "encrypted reasoning",
}
PATCH = 28  # pixels of a side that become one token: 14-pixel patches, merged 2 x 2
_PNG = b"\x89PNG\r\n\x1a\n"
_DATA_URL = re.compile(r"data:[^,]{0,100},")
_PNG_HEAD = 32  # characters of base64 that hold signature, IHDR, width and height


@dataclass(frozen=True)
class Opaque:
    """A part whose tokens no text gives.

    `kind`    image, audio, video, file, encrypted reasoning, previous_response_id, or the type of its block
    `name`    64-bit hash of its content
    `size`    bytes in the body
    `tokens`  None if unknown
    `by_size` whether the tokens follow from width and height
    """

    kind: str
    name: int
    size: int
    tokens: int | None = None
    by_size: bool = False


def opaque_block(kind: str, block: Mapping[str, Any], image_tokens: int | None) -> Opaque:
    """Return the part that a block of a body holds; `image_tokens` are the tokens of an image, if they are known."""
    content = orjson.dumps({key: value for key, value in block.items() if key not in ("cache_control", "id")})
    name, size = hash_name(content), len(content)
    if kind != "image":
        return Opaque(kind, name, size)
    if image_tokens is not None:
        return Opaque(kind, name, size, image_tokens)
    pixels = _pixels(block)
    tokens = None if pixels is None else -(-pixels[0] // PATCH) * -(-pixels[1] // PATCH)
    return Opaque(kind, name, size, tokens, by_size=tokens is not None)


def _pixels(block: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return width and height of an image, from the block or from the head of a PNG in it."""
    image = block.get("image_url")
    places = [block, image if isinstance(image, dict) else {}, block.get("source") or {}]
    for path in places:
        if isinstance(path, dict):
            sides = path.get("width"), path.get("height")
            if all(type(side) is int and side > 0 for side in sides):
                return sides  # type: ignore[return-value]
    texts = [image, *(path.get(key) for path in places if isinstance(path, dict) for key in ("url", "data"))]
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
