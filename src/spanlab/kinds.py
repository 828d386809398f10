"""Kinds: one dataclass per kind of a choice, such as `arrivals.kind`, is the schema of its keys.

A field declares its default, the check of its value and its meaning:
`rate_rps: float = field(REQUIRED, positive, "mean rate, requests per second")`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from spanlab.registry import (
    REQUIRED,
    Factory,
    Registry,
    among,
    check_keys,
    file_of,
    is_instance,
    one_of,
    type_name,
)
from spanlab.registry import field as field


def default_of(key: Field[Any]) -> Any:
    """Return the default of a key; REQUIRED if it has none."""
    if key.default_factory is not MISSING:
        return key.default_factory()
    return REQUIRED if key.default is MISSING else key.default


def check_fields(settings: Any, path: str) -> None:
    """Raise ValueError for a required key that is not set, and for a value that its field refuses.

    `path`  key of these settings
    """
    key = next(
        (kinds.key for base in type(settings).__mro__ if (kinds := kinds_of(base)) is not None),
        None,
    )
    chosen = path if key is None else f"{path}.{key}={getattr(settings, key)}"
    check_keys(settings, lambda name: f"{path}.{name}", chosen)


def typed(path: str, value: Any, hint: Any) -> Any:
    """Return a value of settings as the type that its key declares; ValueError for a value of
    another type.

    Keys with values become the dataclass of the hint, a whole number becomes a number or text where
    these are declared.
    """
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)
    for kind in kinds:
        if is_dataclass(kind) and value is not None and not isinstance(value, kind):  # type: ignore[arg-type]
            return _section(path, value, kind)
        if get_origin(kind) is list and isinstance(value, list):
            return [
                typed(f"{path}[{index}]", item, get_args(kind)[0])
                for index, item in enumerate(value)
            ]
        if get_origin(kind) is dict and isinstance(value, Mapping):
            return {
                key: typed(f"{path}.{key}", item, get_args(kind)[1]) for key, item in value.items()
            }
    if hint is Any:
        return value
    if str in kinds and type(value) in (int, float, bool) and type(value) not in kinds:
        return str(value)
    if not is_instance(value, hint):
        raise ValueError(f"{path}={shown(value)}: expected {type_name(hint)}")
    return float(value) if type(value) is int and int not in kinds and float in kinds else value


def _section(path: str, values: Any, schema: Any) -> Any:
    hints = _hints_of(schema)
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}={values}: expected its keys, {', '.join(hints)}")
    for key in values:
        if key not in hints:
            raise ValueError(f"{path}.{key}: no such key; expected {among(key, hints)}")
    return schema(
        **{key: typed(f"{path}.{key}", value, hints[key]) for key, value in values.items()}
    )


def shown(value: Any) -> Any:
    """Return a value as settings spell it."""
    if value is None or value == REQUIRED:
        return "null"
    return str(value).lower() if isinstance(value, bool) else value


@cache
def _hints_of(schema: Any) -> dict[str, Any]:
    hints = get_type_hints(schema)  # which takes milliseconds
    return {key.name: hints[key.name] for key in fields(schema)}


def _changed(path: str, value: Any, default: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of a section that have another value than by default: path, value, default."""
    if is_dataclass(value) and type(value) is type(default):
        for key in fields(value):
            yield from _changed(
                f"{path}.{key.name}", getattr(value, key.name), getattr(default, key.name)
            )
    elif value != default:
        yield path, value, default


@dataclass
class Kind:
    """Base of the kinds of one choice; `kind` is the registered name."""

    kind: str = field(REQUIRED, None, "the kind")


K = TypeVar("K")


class Kinds(Registry[K]):
    """Dataclasses by name; each is the schema of the keys that go with its name.

    `what`  the section, for errors
    `base`  class that the dataclasses extend; a field of this type takes any of them
    `key`   the key that chooses, a field of `base`; where its default is null, null chooses `base`
            itself
    """

    def __init__(self, what: str, base: type[K], key: str = "kind") -> None:
        super().__init__(what)
        self.base, self.key = base, key
        _kinds_of[base] = self

    def register(self, name: str, needs: Iterable[str] = ()) -> Callable[[Factory], Factory]:
        """Return a decorator of a class, below `@dataclass`, which gives the class its name as a
        field."""

        def add(kind: Any) -> Any:
            where = f"{file_of(kind)}: {kind.__name__}"
            if not (inspect.isclass(kind) and issubclass(kind, self.base)):
                expected = f"expected a subclass of {self.base.__name__} (docs/extending.md)"
                raise ValueError(f"{where}: {self._what}={name}: {expected}")
            if "__dataclass_fields__" in vars(kind):
                raise ValueError(
                    f"{where}: {self._what}={name}: expected @dataclass above @register"
                )
            kind.__annotations__ = {self.key: "str"} | inspect.get_annotations(kind)
            meaning = next(
                key.metadata["meaning"]
                for key in fields(cast(Any, self.base))
                if key.name == self.key
            )
            setattr(kind, self.key, field(name, None, meaning))
            return Registry.register(self, name, needs)(kind)

        return add

    def chosen(self, name: str | None) -> Any:
        """Return the dataclass of a name, or `base` for null where that is a choice."""
        return (
            self.base if name is None and getattr(self.base, self.key) is None else self[str(name)]
        )

    def schema(self, name: str) -> Any:
        """Return the dataclass of a name, whose fields are its keys."""
        return self[name]

    def hints(self, name: str | None) -> dict[str, Any]:
        """Return the types of the keys of a kind, the choosing one among them."""
        kind: Any = self.chosen(name)
        if "__dataclass_fields__" not in vars(kind):
            where = f"{file_of(kind)}: {kind.__name__}: {self._what}={name}"
            raise ValueError(f"{where}: expected @dataclass above @register")
        return _hints_of(kind)

    def all_hints(self) -> dict[str, Any]:
        """Return the types of the keys of all kinds together."""
        return {key: hint for name in self for key, hint in self.hints(name).items()}

    def of(self, path: str, values: Mapping[str, Any]) -> K:
        """Return the settings of the kind that `values` names.

        A null or a default is dropped where the kind has no such key: entries and earlier run
        folders have them for keys of other kinds. ValueError for all else that the kind has no key
        for.

        `path`  key of these settings, for errors
        """
        name = values.get(self.key)
        if name is not None or getattr(self.base, self.key) is not None:
            one_of(f"{path}.{self.key}", str(name), self)
        hints, known, made = self.hints(name), self.all_hints(), {}
        # Keys of plugins stood below `options` in earlier commands and run folders.
        given = {key: value for key, value in values.items() if key not in (self.key, "options")}
        options = values.get("options") or {}
        for key, value in (given | options).items():
            if key not in known:
                below = f"{path}.options" if key in options else path
                raise ValueError(f"{below}.{key}: no such key; expected {among(key, hints)}")
            hint = known[key] if key not in hints else hints[key]
            item = value if value is None else typed(f"{path}.{key}", value, hint)
            if key in hints:
                # null where the key needs a value says that it is not set
                made[key] = REQUIRED if value is None and not is_instance(None, hint) else item
            elif value is not None:
                self._refuse_other(path, name, key, item)
        settings: K = self.chosen(name)(**made)
        return settings

    def _refuse_other(self, path: str, name: str | None, key: str, value: Any) -> None:
        """Raise ValueError for a value of a key that the kind has not, unless it is the default of
        one that has it."""
        classes: dict[str, Any] = {kind: self[kind] for kind in self}
        items = [
            (kind, item) for kind in classes for item in fields(classes[kind]) if item.name == key
        ]
        defaults = {kind: default_of(item) for kind, item in items}
        if value in defaults.values():
            return
        unset = None if None in defaults.values() else next(iter(defaults.values()))
        leaf, changed, default = next(_changed(f"{path}.{key}", value, unset))
        expected = f"expected {leaf}={shown(default)}, for it goes with {', '.join(defaults)}"
        sections: dict[str, Any] = {
            block: hint for block, hint in self.hints(name).items() if is_dataclass(hint)
        }
        word = leaf.rpartition(".")[2]
        near = [
            f"{path}.{block}.{word}" for block, hint in sections.items() if word in _hints_of(hint)
        ]
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"{leaf}={shown(changed)} with {path}.{self.key}={shown(name)}: {expected}{meant}"
        )


_kinds_of: dict[type[Any], Kinds[Any]] = {}


def kinds_of(hint: Any) -> Kinds[Any] | None:
    """Return the kinds that a field of this type takes; None if it is no base of kinds."""
    return _kinds_of.get(hint) if isinstance(hint, type) else None


def schema_of_kind(hint: Any, section: Mapping[str, Any]) -> Any:
    """Return the dataclass that a section of a base type chooses; `hint` itself for other types."""
    kinds = kinds_of(hint)
    name = None if kinds is None else section.get(kinds.key)
    return hint if kinds is None or name is None or name not in kinds else kinds[name]
