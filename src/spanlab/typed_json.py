"""JSON of foreign files as typed values; an error is one sentence about the first invalid value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from pydantic import ValidationError

T = TypeVar("T")

_SHOWN = 60  # characters of a wrong value in a message
#: What was expected, by the type of pydantic's error; other errors have a text of their own.
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "string_unicode": "a text of Unicode characters",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "{ge} or more",
    "less_than_equal": "at most {le}",
    "too_short": "a list of {min_length} or more",
}


def from_json(text: bytes, kind: type[T], unknown: Literal["forbid", "ignore"] = "forbid") -> T:
    """Return JSON as `kind`, such as a dataclass; no value is converted, and unknown keys are
    errors, or ignored.

    Raises ValueError: `key[0].name=VALUE: expected X`.
    """
    # Its import takes 0.06 s, which runs that read no such file do not spend.
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_json(text, strict=True, extra=unknown)
    except ValidationError as error:
        raise ValueError(first_mistake(error)) from error


def of_kind(value: object, kind: type[T], path: str) -> T:
    """Return a value of JSON as `kind`, with the errors of `from_json`; `path` names it."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise ValueError(first_mistake(error, path)) from error


def first_mistake(error: ValidationError, root: str = "") -> str:
    """Return one sentence about the first invalid value, with its path below `root`.

    The ValueError of a validator says what follows on the path of its object: `KEY=VALUE: expected
    X`.
    """
    mistake = error.errors(include_url=False)[0]
    path = root
    for step in mistake["loc"]:
        path += (
            f"[{step}]" if isinstance(step, int) else f".{shown(step)}" if step != "[key]" else ""
        )
    path, kind, context = path.removeprefix("."), mistake["type"], mistake.get("ctx", {})
    if kind == "json_invalid":
        return f"expected JSON, but {context['error']}"
    if kind == "value_error":
        return f"{path}.{context['error']}".removeprefix(".")
    if kind == "missing":
        return f"{path} is missing"
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{path}: no such key"
    if kind == "literal_error":
        expected = context["expected"].replace("'", "").replace("None", "null")
    else:
        expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else mistake["msg"]
    value = shown(mistake["input"])
    return f"{path}={value}: expected {expected}" if path else f"expected {expected}, not {value}"


def shown(value: object) -> str:
    """Return a value as a message shows it: on one line, and not longer than a few words."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@contextmanager
def reading(source: str, expected: str) -> Iterator[None]:
    """Turn errors of reading a file into one sentence: `SOURCE: MISTAKE; expected EXPECTED`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}; expected {expected}") from error
    except ValueError as error:
        raise ValueError(f"{source}: {error}; expected {expected}") from error
