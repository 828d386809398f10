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
    """How many of its drafts a request keeps behind its output token `generated`: a formula, as for its tokens."""
    return (5 * request + 3 * generated) % (drafts + 1)


def read_cases(path: Path) -> list[Case]:
    """The cases of a JSON file; ValueError names the first key that is wrong."""
    try:
        content = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ValueError(f"cases={path}: expected a JSON file ({error})") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"cases={path}: expected an object of cases by name")
    return [_case(name, given) for name, given in content.items()]


def _case(name: str, given: Any) -> Case:
    _check_keys(name, given, _KEYS, {*_SIZES, "requests"})
    for key in _SIZES:
        _check_count(f"{name}.{key}", given[key], 1)
    mode, retention = given.get("mamba_mode"), given.get("retention")
    if mode not in _MODES:
        raise ValueError(f"{name}.mamba_mode={mode}: expected null or align, the modes of vLLM 0.32.0")
    if retention is not None:
        _check_count(f"{name}.retention", retention, 0)
        if mode and retention % given["block_size"]:
            expected = f"expected a multiple of block_size={given['block_size']}"
            raise ValueError(f"{name}.retention={retention}: {expected}")
    drafts = given.get("draft_tokens", 0)
    _check_count(f"{name}.draft_tokens", drafts, 0)
    if drafts and mode:
        raise ValueError(
            f"{name}.draft_tokens={drafts} with mamba_mode={mode}: expected 0, for states are not taken back"
        )
    if not isinstance(given["requests"], list):
        raise ValueError(f"{name}.requests={given['requests']}: expected a list")
    return Case(
        name=name,
        **{key: given[key] for key in _SIZES},
        mamba_mode=mode,
        state_groups=_state_groups(name, given, mode),
        retention=retention,
        draft_tokens=drafts,
        draft_method=_draft_method(name, given, drafts),
        async_scheduling=_asynchronous(name, given, drafts),
        requests=tuple(_request(name, at, one) for at, one in enumerate(given["requests"])),
    )


def _draft_method(name: str, given: dict[str, Any], drafts: int) -> str:
    """Who drafts: n-grams if nothing is said."""
    method: str = given.get("draft_method", "ngram")
    if method not in _METHODS:
        raise ValueError(f"{name}.draft_method={method}: expected ngram or eagle")
    if "draft_method" in given and not drafts:
        raise ValueError(f"{name}.draft_method={method}: expected draft_tokens beside it")
    return method


def _asynchronous(name: str, given: dict[str, Any], drafts: int) -> bool:
    """Whether a step is planned while the one before it runs."""
    asynchronous = given.get("async_scheduling", False)
    if type(asynchronous) is not bool:
        raise ValueError(f"{name}.async_scheduling={asynchronous}: expected true or false")
    if asynchronous and drafts:
        raise ValueError(f"{name}.async_scheduling=true with draft_tokens={drafts}: expected false")
    return asynchronous


def _state_groups(name: str, given: dict[str, Any], mode: str | None) -> int:
    """Groups of recurrent layers: one if nothing is said, none without such layers."""
    groups: int = given.get("state_groups", int(mode is not None))
    _check_count(f"{name}.state_groups", groups, int(mode is not None))
    if groups and mode is None:
        raise ValueError(f"{name}.state_groups={groups}: expected mamba_mode=align beside it")
    return groups


def _request(name: str, at: int, given: Any) -> Request:
    key = f"{name}.requests[{at}]"
    _check_keys(key, given, _REQUEST_KEYS, {"tokens", "output_len"})
    _check_count(f"{key}.output_len", given["output_len"], 1)
    arrived = given.get("arrive_step", 0)
    _check_count(f"{key}.arrive_step", arrived, 0)
    tokens = _tokens(key, given["tokens"])
    output = FIRST_OUTPUT_ID + np.arange(given["output_len"], dtype=np.int32) % OUTPUT_IDS
    return Request(at, 0, (Span(tokens),), given["output_len"], arrived, output=output)


def _tokens(key: str, given: Any) -> np.ndarray:
    expected = f"{key}.tokens: expected a list of token ids from 0 to {np.iinfo(np.int32).max}"
    if not isinstance(given, list) or not given or not all(type(one) is int for one in given):
        raise ValueError(expected)
    if min(given) < 0 or max(given) > np.iinfo(np.int32).max:
        raise ValueError(expected)
    return np.array(given, np.int32)


def _check_keys(name: str, given: Any, known: set[str], needed: set[str]) -> None:
    if not isinstance(given, dict):
        raise ValueError(f"{name}={given}: expected an object")
    for key in given:
        if key not in known:
            raise ValueError(f"{name}.{key}: no such key; expected {', '.join(sorted(known))}")
    for key in sorted(needed - given.keys()):
        raise ValueError(f"{name}.{key} is missing")


def _check_count(key: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{key}={value}: expected a whole number of {least} or more")
