"""Kinds: one dataclass per kind of a choice, such as `arrivals.kind`, is the schema of its keys.

A field declares its default, the check of its value and its meaning:
`rate_rps: float = field(REQUIRED, positive, "mean rate, requests per second")`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast, get_args, get_type_hints

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
from spanlab.registry import (
    field as field,
)


def check_fields(settings: Any, path: str) -> None:
    """Raise ValueError for a required key that is not set, and for a value that its field refuses.

    `path`  key of these settings
    """
    key = next(kinds.key for base in type(settings).__mro__ if (kinds := kinds_of(base)) is not None)
    check_keys(settings, lambda name: f"{path}.{name}", f"{path}.{key}={getattr(settings, key)}")


@dataclass
class Kind:
    """Base of the kinds of one choice; `kind` is the registered name."""

    kind: str = field(REQUIRED, None, "the kind")


K = TypeVar("K")


class Kinds(Registry[K]):
    """Dataclasses by name; each is the schema of the keys that go with its name.

    `what`  the section, for errors
    `base`  class that the dataclasses extend; a field of this type takes any of them
    `key`   the key that chooses, a field of `base`; where its default is null, null chooses `base` itself
    """

    def __init__(self, what: str, base: type[K], key: str = "kind") -> None:
        super().__init__(what)
        self.base, self.key = base, key
        _kinds_of[base] = self

    def register(self, name: str, needs: Iterable[str] = ()) -> Callable[[Factory], Factory]:
        """Return a decorator of a class, below `@dataclass`, which gives the class its name as a field."""

        def add(kind: Any) -> Any:
            where = f"{file_of(kind)}: {kind.__name__}"
            if not (inspect.isclass(kind) and issubclass(kind, self.base)):
                expected = f"expected a subclass of {self.base.__name__} (docs/extending.md)"
                raise ValueError(f"{where}: {self._what}={name}: {expected}")
            if "__dataclass_fields__" in vars(kind):
                raise ValueError(f"{where}: {self._what}={name}: expected @dataclass above @register")
            kind.__annotations__ = {self.key: "str"} | inspect.get_annotations(kind)
            meaning = next(key.metadata["meaning"] for key in fields(cast(Any, self.base)) if key.name == self.key)
            setattr(kind, self.key, field(name, None, meaning))
            return Registry.register(self, name, needs)(kind)

        return add

    def chosen(self, name: str | None) -> Any:
        """Return the dataclass of a name, or `base` for null where that is a choice."""
        return self.base if name is None and getattr(self.base, self.key) is None else self[str(name)]

    def schema(self, name: str) -> Any:
        """Return the dataclass of a name, whose fields are its keys."""
        return self[name]

    def hints(self, name: str | None) -> dict[str, Any]:
        """Return the types of the keys of a kind, the choosing one among them."""
        kind: Any = self.chosen(name)
        if "__dataclass_fields__" not in vars(kind):
            where = f"{file_of(kind)}: {kind.__name__}: {self._what}={name}"
            raise ValueError(f"{where}: expected @dataclass above @register")
        if kind not in _hints:
            hints = get_type_hints(kind)
            _hints[kind] = {key.name: hints[key.name] for key in fields(kind)}
        return _hints[kind]

    def all_hints(self) -> dict[str, Any]:
        """Return the types of the keys of all kinds together."""
        return {key: hint for name in self for key, hint in self.hints(name).items()}

    def of(self, path: str, values: Mapping[str, Any]) -> K:
        """Return the settings of the kind that `values` names.

        A null is dropped where the kind has no such key: entries and earlier run folders have
        nulls for keys of other kinds. ValueError for all else that the kind has no key for.

        `path`  key of these settings, for errors
        """
        name = values.get(self.key)
        if name is not None or getattr(self.base, self.key) is not None:
            one_of(f"{path}.{self.key}", str(name), self)
        hints, known, made = self.hints(name), self.all_hints(), {}
        # Keys of plugins stood below `options` in earlier commands and run folders.
        given = {key: value for key, value in values.items() if key not in (self.key, "options")}
        for key, value in (given | (values.get("options") or {})).items():
            if key not in known:
                raise ValueError(f"{path}.{key}: no such key; expected {among(key, hints)}")
            hint = known[key] if key not in hints else hints[key]
            if value is not None and not is_instance(value, hint):
                raise ValueError(f"{path}.{key}={value}: expected {type_name(hint)}")
            if type(value) is int and int not in (hint, *get_args(hint)):
                value = float(value)
            if key not in hints and value is not None:
                takers = ", ".join(kind for kind in self if key in self.hints(kind))
                expected = f"expected {path}.{key}=null, for it goes with {takers}"
                chosen = f"{path}.{self.key}={'null' if name is None else name}"
                raise ValueError(f"{path}.{key}={value} with {chosen}: {expected}")
            if key in hints:
                # null where the key needs a value says that it is not set
                made[key] = REQUIRED if value is None and not is_instance(None, hint) else value
        settings: K = self.chosen(name)(**made)
        return settings


_kinds_of: dict[type[Any], Kinds[Any]] = {}
_hints: dict[type[Any], dict[str, Any]] = {}  # resolving annotations takes milliseconds


def kinds_of(hint: Any) -> Kinds[Any] | None:
    """Return the kinds that a field of this type takes; None if it is no base of kinds."""
    return _kinds_of.get(hint) if isinstance(hint, type) else None


def schema_of_kind(hint: Any, section: Mapping[str, Any]) -> Any:
    """Return the dataclass that a section of a base type chooses; `hint` itself for other types."""
    kinds = kinds_of(hint)
    name = None if kinds is None else section.get(kinds.key)
    return hint if kinds is None or name is None or name not in kinds else kinds[name]
