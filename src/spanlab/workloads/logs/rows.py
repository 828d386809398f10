"""Rows of a log: typed fields, and one-sentence errors for invalid ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import numpy as np
import orjson

from spanlab.workloads.logs.log import LONGEST_S, Identity, Ints, hash_name
from spanlab.workloads.logs.observed import Moments

#: Fields with the arrival of a request; proxies write startTime, and where that is missing, endTime is the nearest.
TIMES = ("timestamp", "startTime", "start_time", "created", "created_at", "time", "ts", "endTime", "logging_time")
_LARGEST_COUNT = np.iinfo(np.int32).max
_MOST_DIGITS = 99  # int() refuses strings of thousands of digits
#: Ranges of dates as milliseconds, microseconds and nanoseconds since 1970, from 2001 on.
_EPOCHS = {1e-3: (1e12, 1e13), 1e-6: (1e15, 1e16), 1e-9: (1e18, 1e19)}


#: What other writers put into JSON, although it is none: no numbers, and halves of characters beyond 16 bits.
_NO_JSON = re.compile(rb"\b(NaN|Infinity)\b|\\u[dD][89a-fA-F]")


def parse_json(text: bytes | str, loads: Callable[[Any], Any] = orjson.loads) -> Any:
    """Return the value of a JSON text; NaN and infinite numbers are null, and halves of characters question marks.

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
        """Return a field that is a list of integers from 0 to below 2^31, such as token ids; int64."""
        numbers = self.ids(*names)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= _LARGEST_COUNT:
            raise BadFieldError(names[0], f"a list of whole numbers from 0 to below 2^31{actual(self.get(*names))}")
        return numbers

    def ids(self, *names: str) -> Ints:
        """Return a field that is a list of integers of 64 bits, int64; unsigned ones keep their bits."""
        values = self.get(*names)
        if isinstance(values, list) and set(map(type, values)) <= {int}:  # a bool is an int, but no id
            for type_ in (np.int64, np.uint64):
                try:
                    return np.array(values, dtype=type_).view(np.int64)
                except OverflowError:
                    continue
        raise BadFieldError(names[0], f"a list of whole numbers of 64 bits, all signed or all unsigned{actual(values)}")

    def numbers(self, name: str) -> list[float]:
        """Return a field that is a list of finite numbers."""
        values = self.get(name)
        if not isinstance(values, list) or not all(map(_is_finite, values)):
            raise BadFieldError(name, f"a list of numbers{actual(values)}")
        return values

    def label(self, *names: str) -> str | float | None:
        """Return a field that is a text or a number, such as a session's name; None if no field is present."""
        value = self.get(*names)
        if value is not None and (not isinstance(value, (str, int, float)) or isinstance(value, bool)):
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
        """Return a field in units of `scale` seconds as seconds, if 64-bit nanoseconds can hold it."""
        number = self.number(*names, most=LONGEST_S / scale)
        return None if number is None else number * scale

    def seconds(self, *names: str, scale: float = 1.0) -> float | None:
        """Return a field as seconds: a number in units of `scale` seconds, or a date; None if no field is present.

        Numbers of seconds may also be dates in milli-, micro- or nanoseconds since 1970, which no seconds reach.
        """
        value = self.get(*names)
        if value is None:
            return None
        number = _to_number(value)
        if number is not None:
            if scale == 1.0:
                scale = next((unit for unit, (least, end) in _EPOCHS.items() if least <= number < end), scale)
            return number * scale
        try:
            # BigQuery writes UTC behind a date, and some programs slashes in it
            date = datetime.fromisoformat(_SLASHES.sub(r"\1-\2-", value.strip().removesuffix(" UTC")))
            return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        except (AttributeError, TypeError, ValueError, OverflowError) as error:  # not every value is a text
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


def _is_finite(value: object) -> bool:
    return not isinstance(value, str) and _to_number(value) is not None


def _to_number(value: object) -> float | None:
    """Return a finite number, also from text; None for any other value."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else np.nan
    except (ValueError, OverflowError):
        return None
    return number if np.isfinite(number) else None


def actual(value: object) -> str:
    """Return the end of an error message: the value that was found instead."""
    return ", and it is missing" if value is None else f", not {str(value)[:40]!r}"


#: Fields that name what a server caches apart, by the part of an identity that they are.
_IDENTITY: dict[str, tuple[str, ...]] = {
    "model": ("model", "model_name", "modelId"),
    "adapter": ("lora_name", "lora_path", "lora_request.lora_name", "lora_id", "adapter", "adapter_name"),
    "salt": ("cache_salt", "salt", "extra_key"),
    "rank": ("data_parallel_rank", "dp_rank"),
    "media": ("mm_hashes", "mm_hash", "image_data", "video_data", "audio_data", "multi_modal_data"),
}


def record_of(row: Row, *names: str) -> str | int | None:
    """Return the id that a log gives a request; None if it has none."""
    value = row.get(*names)
    return value if isinstance(value, (str, int)) else None


def identity_of(row: Row, *prefixes: str) -> Identity:
    """Return what a server caches apart: model, adapter, salt, data-parallel rank, and media with its content.

    Requests with different identities share no cached tokens. `prefixes` precede the names of the fields.
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
def _identity_fields(prefixes: tuple[str, ...]) -> tuple[frozenset[str], list[tuple[str, list[str]]]]:
    """Return the keys of a row that can hold an identity, and the fields by part of an identity."""
    fields = [(kind, [f"{prefix}{name}" for name in names for prefix in prefixes]) for kind, names in _IDENTITY.items()]
    return frozenset(name.partition(".")[0] for _, names in fields for name in names), fields


def moments_of(row: Row) -> Moments:
    """Return the times of first and last token, as proxies write them."""
    first, last = row.seconds("completionStartTime"), row.seconds("endTime")
    return Moments(*(np.nan if time is None else time for time in (None, None, first, last)))
