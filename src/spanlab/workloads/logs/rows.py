"""Rows of a log: typed fields, one-sentence errors for invalid ones, and the counts that a server
reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.log import LONGEST_S, Identity, Ints, hash_name
from spanlab.workloads.logs.observed import NOT_REPORTED, Moments, Usage

#: Fields with the arrival of a request; proxies write startTime, and where that is missing, endTime
#: is the nearest.
TIMES = (
    "timestamp",
    "startTime",
    "start_time",
    "created",
    "created_at",
    "time",
    "ts",
    "endTime",
    "logging_time",
)
_LARGEST_COUNT = np.iinfo(np.int32).max
_MOST_DIGITS = 99  # int() refuses strings of thousands of digits
#: Ranges of dates as milliseconds, microseconds and nanoseconds since 1970, from 2001 on.
_EPOCHS = {1e-3: (1e12, 1e13), 1e-6: (1e15, 1e16), 1e-9: (1e18, 1e19)}


#: What other writers put into JSON, although it is none: no numbers, and halves of characters
#: beyond 16 bits.
_NO_JSON = re.compile(rb"\b(NaN|Infinity)\b|\\u[dD][89a-fA-F]")


def parse_json(text: bytes | str, loads: Callable[[Any], Any] = orjson.loads) -> Any:
    """Return the value of a JSON text; NaN and infinite numbers are null, and halves of characters
    question marks.

    Raises orjson.JSONDecodeError for any other text that is no JSON.
    """
    try:
        return loads(text)
    except orjson.JSONDecodeError as error:
        data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        if _NO_JSON.search(data) is None:
            raise
        try:
            value = json.loads(data, parse_constant=lambda _: None)
            return orjson.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):
            raise error from None


_SLASHES = re.compile(r"\A(\d{4})/(\d\d)/")


class BadFieldError(ValueError):
    """Invalid field of a line: `FIELD: expected X`."""

    def __init__(self, name: str, expected: str) -> None:
        super().__init__(f"{name}: expected {expected}")


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON object or CSV row; a dotted name refers to a field of a nested object."""

    fields: dict[str, Any]

    def get(self, *names: str) -> Any:
        """Return the value of the first of these fields that is present; None if none is."""
        for name in names:
            value: Any = self.fields.get(name) if "." not in name else self.fields
            for key in name.split(".") if "." in name else ():
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                return value
        return None

    def count(self, *names: str, least: int = 0, default: int | None = None) -> int:
        """Return a field as an integer of at least `least`."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        number = _to_integer(value)
        if number is None or number < least:
            raise BadFieldError(names[0], f"a whole number from {least} up{actual(value)}")
        if number > _LARGEST_COUNT:
            raise BadFieldError(names[0], f"a whole number below 2^31{actual(value)}")
        return number

    def counts(self, *names: str) -> Ints:
        """Return a field that is a list of integers from 0 to below 2^31, such as token ids;
        int64."""
        numbers = self.ids(*names)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= _LARGEST_COUNT:
            raise BadFieldError(
                names[0], f"a list of whole numbers from 0 to below 2^31{actual(self.get(*names))}"
            )
        return numbers

    def ids(self, *names: str) -> Ints:
        """Return a field that is a list of integers of 64 bits, int64; unsigned ones keep their
        bits."""
        values = self.get(*names)
        # a bool is an int, but no id
        if isinstance(values, list) and set(map(type, values)) <= {int}:
            for type_ in (np.int64, np.uint64):
                try:
                    return np.array(values, dtype=type_).view(np.int64)
                except OverflowError:
                    continue
        raise BadFieldError(
            names[0],
            f"a list of whole numbers of 64 bits, all signed or all unsigned{actual(values)}",
        )

    def numbers(self, name: str) -> list[float]:
        """Return a field that is a list of finite numbers."""
        values = self.get(name)
        if not isinstance(values, list) or any(
            isinstance(value, str) or _to_number(value) is None for value in values
        ):
            raise BadFieldError(name, f"a list of numbers{actual(values)}")
        return values

    def label(self, *names: str) -> str | float | None:
        """Return a field that is a text or a number, such as a session's name; None if no field is
        present."""
        value = self.get(*names)
        if value is not None and (
            not isinstance(value, (str, int, float)) or isinstance(value, bool)
        ):
            raise BadFieldError(names[0], f"a text or a number{actual(value)}")
        return value

    def number(self, *names: str, most: float = 1e9) -> float | None:
        """Return a field as a number from 0 to `most`; None if no field is present."""
        value = self.get(*names)
        if value is None:
            return None
        number = _to_number(value)
        if number is None or not 0 <= number <= most:
            raise BadFieldError(names[0], f"a number from 0 to {most:.0e}{actual(value)}")
        return number

    def duration(self, *names: str, scale: float = 1.0) -> float | None:
        """Return a field in units of `scale` seconds as seconds, if 64-bit nanoseconds can hold
        it."""
        number = self.number(*names, most=LONGEST_S / scale)
        return None if number is None else number * scale

    def seconds(self, *names: str, scale: float = 1.0) -> float | None:
        """Return a field as seconds: a number in units of `scale` seconds, or a date; None if no
        field is present.

        Numbers of seconds may also be dates in milli-, micro- or nanoseconds since 1970, which no
        seconds reach.
        """
        value = self.get(*names)
        if value is None:
            return None
        number = _to_number(value)
        if number is not None:
            if scale == 1.0:
                scale = next(
                    (unit for unit, (least, end) in _EPOCHS.items() if least <= number < end), scale
                )
            return number * scale
        try:
            # BigQuery writes UTC behind a date, and some programs slashes in it
            date = datetime.fromisoformat(
                _SLASHES.sub(r"\1-\2-", value.strip().removesuffix(" UTC"))
            )
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (
            AttributeError,
            TypeError,
            ValueError,
            OverflowError,
        ) as error:  # not every value is a text
            raise BadFieldError(names[0], f"a number or a date{actual(value)}") from error


def _to_integer(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        digits = value.strip()
        return int(digits[:_MOST_DIGITS]) if digits.isdecimal() else None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def _to_number(value: object) -> float | None:
    """Return a finite number, also from text; None for any other value."""
    try:
        number = (
            float(value)
            if isinstance(value, (int, float, str)) and not isinstance(value, bool)
            else np.nan
        )
    except (ValueError, OverflowError):
        return None
    return number if np.isfinite(number) else None


def actual(value: object) -> str:
    """Return the end of an error message: the value that was found instead."""
    return ", and it is missing" if value is None else f", not {str(value)[:40]!r}"


#: Fields that name what a server caches apart, by the part of an identity that they are.
_IDENTITY: dict[str, tuple[str, ...]] = {
    "model": ("model", "model_name", "modelId"),
    "adapter": (
        "lora_name",
        "lora_path",
        "lora_request.lora_name",
        "lora_id",
        "adapter",
        "adapter_name",
    ),
    "salt": ("cache_salt", "salt", "extra_key"),
    "rank": ("data_parallel_rank", "dp_rank"),
    "media": ("mm_hashes", "mm_hash", "image_data", "video_data", "audio_data", "multi_modal_data"),
}


def record_of(row: Row, *names: str) -> str | int | None:
    """Return the id that a log gives a request; None if it has none."""
    value = row.get(*names)
    return value if isinstance(value, (str, int)) else None


def identity_of(row: Row, *prefixes: str) -> Identity:
    """Return what a server caches apart: model, adapter, salt, data-parallel rank, and media with
    its content.

    Requests with different identities share no cached tokens. `prefixes` precede the names of the
    fields.
    """
    keys, fields = _identity_fields(prefixes or ("",))
    if keys.isdisjoint(row.fields):
        return ()
    identity = []
    for kind, names in fields:
        value = row.get(*names)
        if kind == "media":
            value = hash_name(orjson.dumps(value)) if value else None
        elif value is not None:
            value = row.label(*names)
        if value is not None and value != "":
            identity.append((kind, value))
    return tuple(identity)


@cache
def _identity_fields(
    prefixes: tuple[str, ...],
) -> tuple[frozenset[str], list[tuple[str, list[str]]]]:
    """Return the keys of a row that can hold an identity, and the fields by part of an identity."""
    fields = [
        (kind, [f"{prefix}{name}" for name in names for prefix in prefixes])
        for kind, names in _IDENTITY.items()
    ]
    return frozenset(name.partition(".")[0] for _, names in fields for name in names), fields


def moments_of(row: Row) -> Moments:
    """Return the times of first and last token, as proxies write them."""
    first, last = row.seconds("completionStartTime"), row.seconds("endTime")
    return Moments(*(np.nan if time is None else time for time in (None, None, first, last)))


# ------------------------------------------------------------------------------
# Counts that a server reports about a request: tokens of its prompt, cached and created ones, and
# output. OpenAI and Gemini count cached tokens inside the prompt, Anthropic and Bedrock beside it.
# ------------------------------------------------------------------------------

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
_AROUND = (
    "",
    "response.",
    "response.body.",
    "response.response.",
    *(f"{name}." for name in _ANSWERS),
)
_GEMINI = tuple(f"{path}{name}" for name in ("usageMetadata", "usage_metadata") for path in _AROUND)
_SGLANG = ("meta_info", "response.meta_info", "out.meta_info")
_FLAT = ("prompt_tokens", "input_tokens")
_OUTPUT_NAMES = ("completion_tokens", "output_tokens")
OUTPUTS = tuple(
    f"{path}{name}" for path in (*(f"{path}." for path in _PLACES), "") for name in _OUTPUT_NAMES
)
_DIGITS_OF_COUNT = 10  # of a count
# of which Anthropic's input_tokens has none
_APART = ("cache_read_input_tokens", "cache_creation_input_tokens")
_WRITTEN = ("cache_write_tokens", "cache_creation_tokens", "cache_creation_input_tokens")


def usage_of(row: Row) -> Usage:
    """Return what a line reports; an absent or null count is unknown, which is not zero.

    Gemini leaves out counts of zero, so that its absent count of cached tokens is zero.
    """
    return counted(_reported(row))


def output_of_cloud(row: Row) -> int:
    """Return the output that Gemini or Bedrock reports, whose names `OUTPUTS` does not have; 0 if
    none is."""
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
    """Return the usage of an answer: of an object, or of a stream's events, of which later counts
    hold.

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
        prompt, cached, of_tools = (
            first_count(usage, *names) for names in (_GEMINI_PROMPT, _GEMINI_CACHED, _GEMINI_TOOLS)
        )
        return inclusive(prompt + np.nan_to_num(of_tools), float(np.nan_to_num(cached)))
    if any(name in usage for name in _BEDROCK_PROMPT) and "input_tokens" not in usage:
        return _of_bedrock(usage)
    read = count_of(usage, "cache_read_input_tokens")
    written = count_of(usage, "cache_creation_input_tokens")
    # Anthropic writes their sum, or those by the time that they stay
    by_time = [
        count_of(usage.get("cache_creation"), f"ephemeral_{time}_input_tokens")
        for time in ("5m", "1h")
    ]
    if known := [count for count in by_time if not np.isnan(count)]:
        written = float(np.nanmax([written, sum(known)]))
    divided = [usage.get(f"{name}_tokens_details") for name in ("prompt", "input")]
    details = [count_of(counts, "cached_tokens") for counts in divided]
    others = [
        count_of(usage, name)
        for name in ("prompt_cache_hit_tokens", "cached_tokens", "num_cached_tokens")
    ]
    cached = next((count for count in (*details, *others) if not np.isnan(count)), np.nan)
    prompt = count_of(usage, "prompt_tokens")
    if np.isnan(prompt) and "prompt_cache_miss_tokens" in usage:
        prompt = count_of(usage, "prompt_cache_hit_tokens") + count_of(
            usage, "prompt_cache_miss_tokens"
        )
    in_details = (count_of(counts, name) for counts in divided for name in _WRITTEN)
    stored = next((count for count in in_details if not np.isnan(count)), written)
    if not np.isnan(prompt):
        return inclusive(prompt, read if np.isnan(cached) else cached, stored)
    prompt = count_of(usage, "input_tokens")
    if (
        "cache_creation" in usage
        and "cache_creation_input_tokens" not in usage
        and not np.isnan(written)
    ):
        usage = {**usage, "cache_creation_input_tokens": written}
    if set(_APART) & set(usage) and np.isnan(details[1]):
        # an absent count of one of the two is none of the prompt, and a null one is unknown
        parts_of_prompt = (
            count for name, count in zip(_APART, (read, written), strict=True) if name in usage
        )
        return Usage(prompt + sum(parts_of_prompt), read, written)
    return inclusive(prompt, cached, stored)


def inclusive(prompt: float, cached: float, created: float = np.nan) -> Usage:
    """Return counts of which the first includes the others; parts beyond the prompt contradict
    that."""
    if cached > prompt:
        return NOT_REPORTED
    return Usage(prompt, cached, np.nan if np.nansum((cached, created)) > prompt else created)


def count_of(counts: Any, name: str) -> float:
    """Return a count of an object, also from a text; NaN if it is missing or no possible number of
    tokens."""
    value = counts.get(name) if isinstance(counts, dict) else None
    # as databases export 64 bits
    if isinstance(value, str) and value.isdecimal() and len(value) <= _DIGITS_OF_COUNT:
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
_GEMINI_ANSWER = (
    "candidatesTokenCount",
    "candidates_token_count",
    "responseTokenCount",
    "response_token_count",
)
_GEMINI_TOTAL = ("totalTokenCount", "total_token_count")


# ------------------------------------------------------------------------------
# Bedrock: cached and created tokens stand beside `inputTokens`. Other programs with these names
# have `cachedInputTokens`, which are inside.
# ------------------------------------------------------------------------------

_BEDROCK_PROMPT = ("inputTokens", "inputTokenCount")
_BEDROCK_READ = ("cacheReadInputTokens", "cacheReadInputTokenCount")
_BEDROCK_WRITTEN = (
    "cacheWriteInputTokens",
    "cacheWriteInputTokenCount",
    "cacheCreationInputTokens",
)
_BEDROCK_OUTPUT = ("outputTokens", "outputTokenCount")


def _of_bedrock(usage: Mapping[str, Any]) -> Usage:
    prompt, read, written = (
        first_count(usage, *names) for names in (_BEDROCK_PROMPT, _BEDROCK_READ, _BEDROCK_WRITTEN)
    )
    if "cachedInputTokens" in usage:
        return inclusive(prompt, count_of(usage, "cachedInputTokens"), written)
    return Usage(prompt + float(np.nansum((read, written))), read, written)


def output_in(usage: Any) -> float:
    """Return the output tokens of an object `usage`, with thoughts; NaN if none are reported."""
    if not isinstance(usage, dict) or not any(name in usage for name in _GEMINI_PROMPT):
        return first_count(usage, *_OUTPUT_NAMES, *_BEDROCK_OUTPUT)
    names = (_GEMINI_PROMPT, _GEMINI_TOOLS, _GEMINI_ANSWER, _GEMINI_THOUGHTS, _GEMINI_TOTAL)
    prompt, of_tools, answer, thoughts, total = (
        float(np.nan_to_num(first_count(usage, *each))) for each in names
    )
    is_inside = total == prompt + of_tools + answer
    return answer if is_inside else answer + thoughts
