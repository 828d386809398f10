"""Cases of a schedule comparison: requests as token ids, the sizes of a cache, and their checks.

The format is the one that a driver of vLLM's scheduler reads: `block_size`, `num_blocks` (the null block among them),
`max_num_seqs`, `max_num_batched_tokens`, `mamba_mode` (null or align), `state_groups` (groups of recurrent layers, 1),
`retention` (null, 0 or tokens), `draft_tokens`, `draft_method` (ngram or eagle), `async_scheduling`, `policy` (fcfs or
priority), `enable_chunked_prefill`, `long_prefill_token_threshold` (0: no limit) and
`long_prefill_token_threshold_adaptive`, as `batch` describes them, and `requests`, each with `tokens`, `output_len`,
`arrive_step`, `priority` (smaller is more urgent), `abort_step` (null, or the step before which it is aborted) and
`cache_salt` (null or a text; requests with different salts share nothing).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spanlab.core.request import Request, Span
from spanlab.core.speculation import Speculation

FIRST_OUTPUT_ID, OUTPUT_IDS = 7, 13
_SIZES = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
_MODES = (None, "align")
_METHODS = ("ngram", "eagle")
_CHOICES = {"mamba_mode", "state_groups", "retention", "draft_tokens", "draft_method", "async_scheduling"}
_THRESHOLD, _ADAPTIVE = "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"
_CHUNKED = "enable_chunked_prefill"
_POLICIES = ("fcfs", "priority")
_NO_WINDOWS = "groups of layers that free blocks behind a window, and their joint hits, are not modelled"
_KEYS = {*_SIZES, "policy", "sliding_window", *_CHOICES, _CHUNKED, _THRESHOLD, _ADAPTIVE, "requests"}
_REQUEST_KEYS = {"tokens", "output_len", "arrive_step", "priority", "abort_step", "cache_salt"}
_LARGEST = 2**31 - 1  # of a size
_MOST_GROUPS = _MOST_DRAFTS = 1024
_LAST_STEP = 2**53 - 1  # whole numbers up to it are exact in every reader of JSON
_LONGEST_OUTPUT = 2**20
_SHOWN = 60  # characters of a wrong value in a message


class Abort(NamedTuple):
    """The step before which a request is aborted, and the request's number."""

    step: int
    request: int


@dataclass(frozen=True, slots=True)
class Case:
    """One workload and one cache; a request's `arrived_at` counts steps; `aborts` are in order."""

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
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    long_prefill_token_threshold_adaptive: bool
    requests: tuple[Request, ...]
    aborts: tuple[Abort, ...]


def accepted(request: int, generated: int, drafts: int) -> int:
    """Number of accepted drafts after `generated` output tokens of a request, by a fixed formula."""
    return (5 * request + 3 * generated) % (drafts + 1)


def read_cases(path: Path) -> list[Case]:
    """The cases of a JSON file; ValueError is one sentence with the file, the case and the first invalid key."""
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except OSError as error:
        raise ValueError(f"cases={path}: expected a readable file ({error.strerror})") from error
    except RecursionError as error:
        raise ValueError(f"cases={path}: expected a JSON file of less depth") from error
    except ValueError as error:
        raise ValueError(f"cases={path}: expected a JSON file ({error})") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f"cases={path}: expected an object of cases by name")
    try:
        return [_case(name, case) for name, case in content.items()]
    except ValueError as error:
        raise ValueError(f"cases={path}: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_key = dict(pairs)
    if len(by_key) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{shown(next(key for key in keys if keys.count(key) > 1))} occurs twice in one object")
    return by_key


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def shown(value: Any) -> str:
    """A value as a message shows it: on one line, and not longer than a few words."""
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else str(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"


def _case(given_name: str, content: Any) -> Case:
    _check_text("a case's name", given_name)
    name = shown(given_name)
    _check_keys(name, content, _KEYS, {*_SIZES, "requests"})
    for key in _SIZES:
        _check_count(f"{name}.{key}", content[key], 1)
    if content["max_num_batched_tokens"] < content["max_num_seqs"]:
        expected = f"expected at least max_num_seqs={content['max_num_seqs']}"
        raise ValueError(f"{name}.max_num_batched_tokens={content['max_num_batched_tokens']}: {expected}")
    mode, retention = content.get("mamba_mode"), content.get("retention")
    if mode not in _MODES:
        raise ValueError(f"{name}.mamba_mode={shown(mode)}: expected null or align, the modes of vLLM 0.32.0")
    if retention is not None:
        _check_count(f"{name}.retention", retention, 0)
        if mode and retention % content["block_size"]:
            expected = f"expected a multiple of block_size={content['block_size']}"
            raise ValueError(f"{name}.retention={retention}: {expected}")
    drafts = content.get("draft_tokens", 0)
    _check_count(f"{name}.draft_tokens", drafts, 0, _MOST_DRAFTS)
    if drafts and mode:
        raise ValueError(
            f"{name}.draft_tokens={drafts} with mamba_mode={mode}: expected 0, for states are not taken back"
        )
    if not isinstance(content["requests"], list) or not content["requests"]:
        raise ValueError(f"{name}.requests={shown(content['requests'])}: expected a list of requests")
    method = _draft_method(name, content, drafts)
    if content.get("sliding_window") is not None:
        raise ValueError(f"{name}.sliding_window={shown(content['sliding_window'])}: expected null, for {_NO_WINDOWS}")
    policy = content.get("policy", _POLICIES[0])
    if policy not in _POLICIES:
        raise ValueError(f"{name}.policy={shown(policy)}: expected fcfs or priority")
    requests = tuple(_request(name, index, fields, policy) for index, fields in enumerate(content["requests"]))
    return Case(
        name=given_name,
        **{key: content[key] for key in _SIZES},
        mamba_mode=mode,
        state_groups=_state_groups(name, content, mode),
        retention=retention,
        draft_tokens=drafts,
        draft_method=method,
        async_scheduling=_asynchronous(name, content, drafts),
        enable_chunked_prefill=_chunked(name, content, requests, Speculation(drafts, method=method)),
        **_threshold(name, content),
        requests=requests,
        aborts=_aborts(name, content["requests"], requests),
    )


def _draft_method(name: str, content: dict[str, Any], drafts: int) -> str:
    """Method of the drafts, by default n-grams."""
    method: str = content.get("draft_method", "ngram")
    if method not in _METHODS:
        raise ValueError(f"{name}.draft_method={shown(method)}: expected ngram or eagle")
    if "draft_method" in content and not drafts:
        raise ValueError(f"{name}.draft_method={method}: expected draft_tokens beside it")
    return method


def _asynchronous(name: str, content: dict[str, Any], drafts: int) -> bool:
    """Whether a step is scheduled while the previous one runs."""
    asynchronous = _switch(name, content, "async_scheduling", default=False)
    if asynchronous and drafts:
        raise ValueError(f"{name}.async_scheduling=true with draft_tokens={drafts}: expected false")
    return asynchronous


def _switch(name: str, content: dict[str, Any], key: str, *, default: bool) -> bool:
    value = content.get(key, default)
    if type(value) is not bool:
        raise ValueError(f"{name}.{key}={shown(value)}: expected true or false")
    return value


def _chunked(name: str, content: dict[str, Any], requests: tuple[Request, ...], drafts: Speculation) -> bool:
    """Whether a prompt may be computed in several steps; if not, vLLM runs no request that is longer than a step."""
    chunked = _switch(name, content, _CHUNKED, default=True)
    if not chunked and content.get("mamba_mode"):
        raise ValueError(f"{name}.{_CHUNKED}=false with mamba_mode={content['mamba_mode']}: expected true, as in vLLM")
    longest = max(request.num_tokens + request.output_len for request in requests)
    longest += drafts.draft_tokens + drafts.lookahead  # vLLM takes no memory behind its longest request
    if not chunked and longest > content["max_num_batched_tokens"]:
        tokens = "the most tokens of a request and its drafts"
        expected = f"expected at least {longest}, {tokens}, with {_CHUNKED}=false, as in vLLM"
        raise ValueError(f"{name}.max_num_batched_tokens={content['max_num_batched_tokens']}: {expected}")
    return chunked


def _threshold(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """The limit of one prompt's tokens in a step, and whether it adapts to the number of requests."""
    threshold, adaptive = content.get(_THRESHOLD, 0), _switch(name, content, _ADAPTIVE, default=False)
    _check_count(f"{name}.{_THRESHOLD}", threshold, 0)
    if threshold and content.get(_CHUNKED) is False:
        reason = f"{_CHUNKED}=false computes a prompt in one step"
        raise ValueError(f"{name}.{_THRESHOLD}={threshold}: expected 0, for {reason}")
    if adaptive and not threshold:
        raise ValueError(f"{name}.{_ADAPTIVE}=true: expected {_THRESHOLD} beside it")
    return {_THRESHOLD: threshold, _ADAPTIVE: adaptive}


def _state_groups(name: str, content: dict[str, Any], mode: str | None) -> int:
    """Number of groups of recurrent layers: by default one, and 0 without such layers."""
    groups: int = content.get("state_groups", int(mode is not None))
    _check_count(f"{name}.state_groups", groups, int(mode is not None), _MOST_GROUPS)
    if groups and mode is None:
        raise ValueError(f"{name}.state_groups={groups}: expected mamba_mode=align beside it")
    return groups


def _request(name: str, index: int, content: Any, policy: str) -> Request:
    key = f"{name}.requests[{index}]"
    _check_keys(key, content, _REQUEST_KEYS, {"tokens", "output_len"})
    _check_count(f"{key}.output_len", content["output_len"], 1, _LONGEST_OUTPUT)
    arrived = content.get("arrive_step", 0)
    _check_count(f"{key}.arrive_step", arrived, 0, _LAST_STEP)
    priority = content.get("priority", 0)
    _check_count(f"{key}.priority", priority, -_LARGEST)
    if priority and policy != "priority":
        raise ValueError(f"{key}.priority={priority}: expected policy=priority beside it")
    salt = content.get("cache_salt")
    if salt is not None:
        _check_text(f"{key}.cache_salt", salt)
    tokens = _tokens(key, content["tokens"])
    output = FIRST_OUTPUT_ID + np.arange(content["output_len"], dtype=np.int32) % OUTPUT_IDS
    output_len = content["output_len"]
    return Request(index, 0, (Span(tokens),), output_len, arrived, salt or "", output=output, priority=priority)


def _aborts(name: str, given: list[dict[str, Any]], requests: tuple[Request, ...]) -> tuple[Abort, ...]:
    """Aborts in order of steps and then of requests."""
    aborts = []
    for request, content in zip(requests, given, strict=True):
        step = content.get("abort_step")
        if step is not None:
            _check_count(f"{name}.requests[{request.id}].abort_step", step, request.arrived_at, _LAST_STEP)
            aborts.append(Abort(step, request.id))
    return tuple(sorted(aborts))


def _tokens(key: str, tokens: Any) -> np.ndarray:
    expected = f"{key}.tokens: expected a list of token ids from 0 to {np.iinfo(np.int32).max}"
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ValueError(expected)
    if min(tokens) < 0 or max(tokens) > np.iinfo(np.int32).max:
        raise ValueError(expected)
    return np.array(tokens, np.int32)


def _check_keys(name: str, content: Any, allowed: set[str], required: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{name}={shown(content)}: expected an object")
    for key in content:
        if key not in allowed:
            raise ValueError(f"{name}.{shown(key)}: no such key; expected {', '.join(sorted(allowed))}")
    for key in sorted(required - content.keys()):
        raise ValueError(f"{name}.{key} is missing")


def _check_count(key: str, value: Any, least: int, most: int = _LARGEST) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{key}={shown(value)}: expected a whole number of {least} or more")
    if value > most:
        raise ValueError(f"{key}={shown(value)}: expected at most {most}")


def _check_text(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{key}={shown(value)}: expected a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key}={shown(value)}: expected a text of Unicode characters") from None
