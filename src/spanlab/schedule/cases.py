"""Cases of a schedule comparison: requests as token ids, the sizes of a cache, and their checks.

The format is the one that a driver of vLLM's scheduler reads: `block_size`, `num_blocks` (the null
block among them), `max_num_seqs`, `max_num_batched_tokens`, `mamba_mode` (null or align),
`state_groups` (groups of recurrent layers, 1), `retention` (null, 0 or tokens), `draft_tokens`,
`draft_method` (ngram or eagle), `async_scheduling` and `requests`, each with `tokens`, `output_len` and `arrive_step`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spanlab.core.request import Request, Span

FIRST_OUTPUT_ID, OUTPUT_IDS = 7, 13
_SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
_MODES = (None, "align")
_METHODS = ("ngram", "eagle")
_CHOICES = {"mamba_mode", "state_groups", "retention", "draft_tokens", "draft_method", "async_scheduling"}
_KEYS = {*_SIZES, *_CHOICES, "requests"}
_REQUEST_KEYS = {"tokens", "output_len", "arrive_step"}


@dataclass(frozen=True, slots=True)
class Case:
    """One workload and one cache; a request's `arrived_at` counts steps."""

    name: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    mamba_mode: str | None
    state_groups: int
    retention: int | None
    draft_tokens: int
    draft_method: str
    async_scheduling: bool
    requests: tuple[Request, ...]


def accepted(request: int, generated: int, drafts: int) -> int:
    """Number of accepted drafts after `generated` output tokens of a request, by a fixed formula."""
    return (5 * request + 3 * generated) % (drafts + 1)


def read_cases(path: Path) -> list[Case]:
    """The cases of a JSON file; ValueError names the first invalid key."""
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"cases={path}: expected a JSON file ({error})") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"cases={path}: expected an object of cases by name")
    return [_case(name, case) for name, case in content.items()]


def _case(name: str, content: Any) -> Case:
    _check_keys(name, content, _KEYS, {*_SIZES, "requests"})
    for key in _SIZES:
        _check_count(f"{name}.{key}", content[key], 1)
    mode, retention = content.get("mamba_mode"), content.get("retention")
    if mode not in _MODES:
        raise ValueError(f"{name}.mamba_mode={mode}: expected null or align, the modes of vLLM 0.32.0")
    if retention is not None:
        _check_count(f"{name}.retention", retention, 0)
        if mode and retention % content["block_size"]:
            expected = f"expected a multiple of block_size={content['block_size']}"
            raise ValueError(f"{name}.retention={retention}: {expected}")
    drafts = content.get("draft_tokens", 0)
    _check_count(f"{name}.draft_tokens", drafts, 0)
    if drafts and mode:
        raise ValueError(
            f"{name}.draft_tokens={drafts} with mamba_mode={mode}: expected 0, for states are not taken back"
        )
    if not isinstance(content["requests"], list):
        raise ValueError(f"{name}.requests={content['requests']}: expected a list")
    return Case(
        name=name,
        **{key: content[key] for key in _SIZES},
        mamba_mode=mode,
        state_groups=_state_groups(name, content, mode),
        retention=retention,
        draft_tokens=drafts,
        draft_method=_draft_method(name, content, drafts),
        async_scheduling=_asynchronous(name, content, drafts),
        requests=tuple(_request(name, index, fields) for index, fields in enumerate(content["requests"])),
    )


def _draft_method(name: str, content: dict[str, Any], drafts: int) -> str:
    """Method of the drafts, by default n-grams."""
    method: str = content.get("draft_method", "ngram")
    if method not in _METHODS:
        raise ValueError(f"{name}.draft_method={method}: expected ngram or eagle")
    if "draft_method" in content and not drafts:
        raise ValueError(f"{name}.draft_method={method}: expected draft_tokens beside it")
    return method


def _asynchronous(name: str, content: dict[str, Any], drafts: int) -> bool:
    """Whether a step is scheduled while the previous one runs."""
    asynchronous = content.get("async_scheduling", False)
    if type(asynchronous) is not bool:
        raise ValueError(f"{name}.async_scheduling={asynchronous}: expected true or false")
    if asynchronous and drafts:
        raise ValueError(f"{name}.async_scheduling=true with draft_tokens={drafts}: expected false")
    return asynchronous


def _state_groups(name: str, content: dict[str, Any], mode: str | None) -> int:
    """Number of groups of recurrent layers: by default one, and 0 without such layers."""
    groups: int = content.get("state_groups", int(mode is not None))
    _check_count(f"{name}.state_groups", groups, int(mode is not None))
    if groups and mode is None:
        raise ValueError(f"{name}.state_groups={groups}: expected mamba_mode=align beside it")
    return groups


def _request(name: str, index: int, content: Any) -> Request:
    key = f"{name}.requests[{index}]"
    _check_keys(key, content, _REQUEST_KEYS, {"tokens", "output_len"})
    _check_count(f"{key}.output_len", content["output_len"], 1)
    arrived = content.get("arrive_step", 0)
    _check_count(f"{key}.arrive_step", arrived, 0)
    tokens = _tokens(key, content["tokens"])
    output = FIRST_OUTPUT_ID + np.arange(content["output_len"], dtype=np.int32) % OUTPUT_IDS
    return Request(index, 0, (Span(tokens),), content["output_len"], arrived, output=output)


def _tokens(key: str, tokens: Any) -> np.ndarray:
    expected = f"{key}.tokens: expected a list of token ids from 0 to {np.iinfo(np.int32).max}"
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ValueError(expected)
    if min(tokens) < 0 or max(tokens) > np.iinfo(np.int32).max:
        raise ValueError(expected)
    return np.array(tokens, np.int32)


def _check_keys(name: str, content: Any, allowed: set[str], required: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{name}={content}: expected an object")
    for key in content:
        if key not in allowed:
            raise ValueError(f"{name}.{key}: no such key; expected {', '.join(sorted(allowed))}")
    for key in sorted(required - content.keys()):
        raise ValueError(f"{name}.{key} is missing")


def _check_count(key: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{key}={value}: expected a whole number of {least} or more")
