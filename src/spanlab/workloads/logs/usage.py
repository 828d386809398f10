"""Counts that a server reports about a request: tokens of its prompt, cached and created ones, and output.

OpenAI and Gemini count cached tokens inside the prompt, Anthropic and Bedrock beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.observed import NOT_REPORTED, Usage
from spanlab.workloads.logs.rows import Row, parse_json

_PLACES: tuple[str, ...] = (
    "usage",
    "response.usage",
    "response.body.usage",
    "body.usage",
    "message.usage",
    "response.message.usage",
)
#: Fields of a line with an answer, beside those with its request.
_ANSWERS = ("modelOutput", "full_response", "output", "response_body", "responseBody")
_PLACES += tuple(f"{name}.usage" for name in _ANSWERS)
_AROUND = ("", "response.", "response.body.", "response.response.", *(f"{name}." for name in _ANSWERS))
_GEMINI = tuple(f"{path}{name}" for name in ("usageMetadata", "usage_metadata") for path in _AROUND)
_SGLANG = ("meta_info", "response.meta_info", "out.meta_info")
_FLAT = ("prompt_tokens", "input_tokens")
_OUTPUT_NAMES = ("completion_tokens", "output_tokens")
OUTPUTS = tuple(f"{path}{name}" for path in (*(f"{path}." for path in _PLACES), "") for name in _OUTPUT_NAMES)
_MOST_DIGITS = 10  # of a count
_APART = ("cache_read_input_tokens", "cache_creation_input_tokens")  # of which Anthropic's input_tokens has none
_WRITTEN = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")


def usage_of(row: Row) -> Usage:
    """Return what a line reports; an absent or null count is unknown, which is not zero.

    Gemini leaves out counts of zero, so that its absent count of cached tokens is zero.
    """
    return counted(_reported(row))


def output_of_cloud(row: Row) -> int:
    """Return the output that Gemini or Bedrock reports, whose names `OUTPUTS` does not have; 0 if none is."""
    return int(np.nan_to_num(output_in(_reported(row))))


def has_server_tools(row: Row) -> bool:
    """Return whether the prompt's count includes results of tools that Gemini's server ran."""
    counts = _reported(row)
    return counts is not None and first_count(counts, *_GEMINI_TOOLS) > 0


def _reported(row: Row) -> Mapping[str, Any] | None:
    usage = row.get(*_PLACES)
    if isinstance(usage, dict):
        return usage
    for places, names in ((_GEMINI, _GEMINI_PROMPT), (_SGLANG, ("prompt_tokens",))):
        counts = row.get(*places)
        if isinstance(counts, dict) and any(name in counts for name in names):
            return counts
    # a proxy that writes flat lines has the counts beside the body
    return row.fields if row.fields.keys() & set(_FLAT) or is_of_cloud(row.fields) else None


def is_of_cloud(counts: Mapping[str, Any]) -> bool:
    """Return whether counts have the names of Gemini or Bedrock."""
    return bool(counts.keys() & {*_GEMINI_PROMPT, *_BEDROCK_PROMPT})


def usage_in(answer: Any) -> Any:
    """Return the usage of an answer: of an object, or of a stream's events, of which later counts hold.

    The events are a list, or a text with one of them a line.
    """
    if isinstance(answer, dict):
        return next((answer[name] for name in _USAGE_NAMES if answer.get(name) is not None), None)
    usage: dict[str, Any] = {}
    for event in _events(answer):
        for inner in (event, *(event.get(name) for name in ("message", "response", "metadata"))):
            if not isinstance(inner, dict):
                continue
            for counts in map(inner.get, _IN_EVENTS):
                if isinstance(counts, dict):
                    usage |= {key: count for key, count in counts.items() if count is not None}
    return usage or None


_USAGE_NAMES = ("usage", "usageMetadata", "usage_metadata")
_IN_EVENTS = (*_USAGE_NAMES, "amazon-bedrock-invocationMetrics")


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(answer, str) and any(f'"{name}"' in answer for name in _IN_EVENTS):
        whole = answer.lstrip()[:1] == "["
        for line in [answer] if whole else answer.splitlines():
            try:
                value = parse_json(line.removeprefix("data:").strip() or "null")
            except orjson.JSONDecodeError:
                continue
            yield from _events(value if whole else [value])
    elif isinstance(answer, list):
        yield from (event for event in answer if isinstance(event, dict))


def counted(usage: Any) -> Usage:
    """Return the counts of an object `usage`, as any server writes it."""
    if not isinstance(usage, dict):
        return NOT_REPORTED
    if any(name in usage for name in _GEMINI_PROMPT):
        return _of_gemini(usage)
    if any(name in usage for name in _BEDROCK_PROMPT) and "input_tokens" not in usage:
        return _of_bedrock(usage)
    read, written = count_of(usage, "cache_read_input_tokens"), _created(usage)
    divided = [usage.get(f"{name}_tokens_details") for name in ("prompt", "input")]
    details = [count_of(counts, "cached_tokens") for counts in divided]
    others = [count_of(usage, name) for name in ("prompt_cache_hit_tokens", "cached_tokens", "num_cached_tokens")]
    cached = next((count for count in (*details, *others) if not np.isnan(count)), np.nan)
    prompt = count_of(usage, "prompt_tokens")
    if np.isnan(prompt) and "prompt_cache_miss_tokens" in usage:
        prompt = count_of(usage, "prompt_cache_hit_tokens") + count_of(usage, "prompt_cache_miss_tokens")
    in_details = (count_of(counts, name) for counts in divided for name in _WRITTEN)
    stored = next((count for count in in_details if not np.isnan(count)), written)
    if not np.isnan(prompt):
        return inclusive(prompt, read if np.isnan(cached) else cached, stored)
    prompt = count_of(usage, "input_tokens")
    if "cache_creation" in usage and "cache_creation_input_tokens" not in usage and not np.isnan(written):
        usage = {**usage, "cache_creation_input_tokens": written}
    if set(_APART) & set(usage) and np.isnan(details[1]):
        # an absent count of one of the two is none of the prompt, and a null one is unknown
        parts_of_prompt = (count for name, count in zip(_APART, (read, written), strict=True) if name in usage)
        return Usage(prompt + sum(parts_of_prompt), read, written)
    return inclusive(prompt, cached, stored)


def _created(usage: Mapping[str, Any]) -> float:
    """Return tokens that Anthropic wrote into a cache: their sum, or the sum of those by the time that they stay."""
    total = count_of(usage, "cache_creation_input_tokens")
    by_time = [count_of(usage.get("cache_creation"), f"ephemeral_{time}_input_tokens") for time in ("5m", "1h")]
    known = [count for count in by_time if not np.isnan(count)]
    return float(np.nanmax([total, sum(known)])) if known else total


def inclusive(prompt: float, cached: float, created: float = np.nan) -> Usage:
    """Return counts of which the first includes the others; parts beyond the prompt contradict that."""
    if cached > prompt:
        return NOT_REPORTED
    return Usage(prompt, cached, np.nan if np.nansum((cached, created)) > prompt else created)


def count_of(counts: Any, name: str) -> float:
    """Return a count of an object, also from a text; NaN if it is missing or no possible number of tokens."""
    value = counts.get(name) if isinstance(counts, dict) else None
    if isinstance(value, str) and value.isdecimal() and len(value) <= _MOST_DIGITS:  # as databases export 64 bits
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**31:
        return np.nan
    return float(value)


def first_count(counts: Any, *names: str) -> float:
    """Return the first of these counts of an object that is known; NaN if none is."""
    return next((count for name in names if not np.isnan(count := count_of(counts, name))), np.nan)


# ------------------------------------------------------------------------------
# Gemini: the prompt includes cached tokens; results of tools that the server ran, and thoughts,
# stand beside prompt and answer.
# ------------------------------------------------------------------------------

_GEMINI_PROMPT = ("promptTokenCount", "prompt_token_count")
_GEMINI_CACHED = ("cachedContentTokenCount", "cached_content_token_count")
_GEMINI_TOOLS = ("toolUsePromptTokenCount", "tool_use_prompt_token_count")
_GEMINI_THOUGHTS = ("thoughtsTokenCount", "thoughts_token_count")
_GEMINI_ANSWER = ("candidatesTokenCount", "candidates_token_count", "responseTokenCount", "response_token_count")
_GEMINI_TOTAL = ("totalTokenCount", "total_token_count")


def _of_gemini(usage: Mapping[str, Any]) -> Usage:
    prompt, cached, of_tools = (first_count(usage, *names) for names in (_GEMINI_PROMPT, _GEMINI_CACHED, _GEMINI_TOOLS))
    return inclusive(prompt + np.nan_to_num(of_tools), float(np.nan_to_num(cached)))


# ------------------------------------------------------------------------------
# Bedrock: cached and created tokens stand beside `inputTokens`. Other programs with these names
# have `cachedInputTokens`, which are inside.
# ------------------------------------------------------------------------------

_BEDROCK_PROMPT = ("inputTokens", "inputTokenCount")
_BEDROCK_READ = ("cacheReadInputTokens", "cacheReadInputTokenCount")
_BEDROCK_WRITTEN = ("cacheWriteInputTokens", "cacheWriteInputTokenCount", "cacheCreationInputTokens")
_BEDROCK_OUTPUT = ("outputTokens", "outputTokenCount")


def _of_bedrock(usage: Mapping[str, Any]) -> Usage:
    prompt, read, written = (first_count(usage, *names) for names in (_BEDROCK_PROMPT, _BEDROCK_READ, _BEDROCK_WRITTEN))
    if "cachedInputTokens" in usage:
        return inclusive(prompt, count_of(usage, "cachedInputTokens"), written)
    return Usage(prompt + float(np.nansum((read, written))), read, written)


def output_in(usage: Any) -> float:
    """Return the output tokens of an object `usage`, with thoughts; NaN if none are reported."""
    if not isinstance(usage, dict) or not any(name in usage for name in _GEMINI_PROMPT):
        return first_count(usage, *_OUTPUT_NAMES, *_BEDROCK_OUTPUT)
    names = (_GEMINI_PROMPT, _GEMINI_TOOLS, _GEMINI_ANSWER, _GEMINI_THOUGHTS, _GEMINI_TOTAL)
    prompt, of_tools, answer, thoughts, total = (float(np.nan_to_num(first_count(usage, *each))) for each in names)
    is_inside = total == prompt + of_tools + answer
    return answer if is_inside else answer + thoughts
