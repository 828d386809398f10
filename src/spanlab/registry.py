"""Registries of functions and classes that settings choose by name; their parameters are the options."""

from __future__ import annotations

import difflib
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

# ------------------------------------------------------------------------------
# Checks of settings; each error is one sentence with the key, the value and what was expected.
# ------------------------------------------------------------------------------

REQUIRED: Any = "???"  # OmegaConf's mark of a value that must be given
_MANY = 12  # choices, above which the nearest is named first
#: Former names of keys and of their values, which readers of older commands may type.
RENAMED = {
    "token_budget": "max_num_batched_tokens",
    "chunked": "enable_chunked_prefill",
    "page": "block_size",
    "hit": "count_hit_as",
    "salt": "cache_salt",
    "KR": "rotate_keys",
    "QR": "rotate_queries",
    "MAT": "pre_rotated",
}


def one_of(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError for a value that is not among the choices, with the nearest choice."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{key}={value}: expected {among(value, choices)}")


def require(chosen: str, *expected: tuple[str, object, object]) -> None:
    """Raise ValueError for a value that does not go with a choice; `expected` has key, value, required value."""
    for key, value, required in expected:
        if value != required:
            raise ValueError(f"{key}={value} with {chosen}: expected {required}")


def refuse_unknown_keys(settings: object, path: str = "") -> None:
    """Raise ValueError for keys that are in no schema: `+key=value` on the command line can add them."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            refuse_unknown_keys(value, f"{path}{name}.")
    if not is_dataclass(settings):
        return
    keys = [field.name for field in fields(settings)]
    for name, value in list(vars(settings).items()):
        if name in keys:
            refuse_unknown_keys(value, f"{path}{name}.")
        elif not hasattr(type(settings), name):  # a cached property is no key
            raise ValueError(f"{path}{name}: no such key; expected {among(name, keys)}")


def positive(key: str, value: float | None) -> None:
    """Raise ValueError unless 0 < value < infinity; None passes."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{key}={value}: expected a number above zero")


def not_negative(key: str, value: float | None) -> None:
    """Raise ValueError unless 0 <= value < infinity; None passes."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{key}={value}: expected zero or more")


def share(key: str, value: float, *, below_one: bool = False) -> None:
    """Raise ValueError unless 0 <= value <= 1, or < 1 with `below_one`."""
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ValueError(f"{key}={value}: expected a share from 0 to {'below 1' if below_one else '1'}")


def check_seeds(key: str, seeds: list[int]) -> None:
    """Raise ValueError for no seeds, repeated, negative or too large ones."""
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
        raise ValueError(f"{key}={seeds}: expected one or more different numbers from 0 to 2^63 - 1")


def among(value: str, choices: Iterable[str]) -> str:
    """Return the list of choices with the nearest one, ignoring case; for a former name, its present name."""
    choices, word = tuple(choices), value.lower()
    if (new := RENAMED.get(value)) in choices:
        return f"one of {', '.join(choices)} (did you mean {new}? {value} was renamed to {new})"
    lower = {choice.lower(): choice for choice in choices}
    likeness = 0.8 if len(word) <= 4 else 0.6  # short words are alike by chance, as nope and none
    near = difflib.get_close_matches(word, lower, 1, likeness)
    near = near or [name for name in lower if word and name.startswith(word)]
    if near and len(choices) > _MANY:
        others = ", ".join(choice for choice in choices if choice != lower[near[0]])
        return f"one of {lower[near[0]]} (did you mean {lower[near[0]]}?), {others}"
    hint = f" (did you mean {lower[near[0]]}?)" if near else ""
    return f"one of {', '.join(choices)}{hint}"


T = TypeVar("T")
Factory = TypeVar("Factory", bound=Callable[..., Any])
Options = Mapping[str, Any]

_TYPE_NAMES: dict[Any, str] = {
    Path: "a file or folder",
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
}


PACKAGES = ("spanlab", "spanlab_sim", "spanlab_kernels")  # all other modules are plugins

_registries: list[Registry[Any]] = []


class Registry(Generic[T]):
    """Factories by name: functions or classes that return a T.

    `what`   the kind of the registered objects, for errors
    `given`  parameters that the program passes; all others are options, which settings may set
    `order`  names that come first, in this order, wherever their files stand
    """

    def __init__(self, what: str, given: tuple[str, ...] = (), order: tuple[str, ...] = ()) -> None:
        self._what, self._given, self._order = what, given, order
        self._factories: dict[str, Callable[..., T]] = {}
        self._needs: dict[str, frozenset[str]] = {}
        _registries.append(self)

    def register(self, name: str, needs: Iterable[str] = ()) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a factory; ValueError if another file has registered the name.

        `needs`  inputs that the program must prepare
        """

        def add(factory: Factory) -> Factory:
            earlier = self._factories.get(name)
            if earlier is not None and file_of(earlier) != file_of(factory):
                files = f"{file_of(earlier)} and {file_of(factory)}"
                raise ValueError(f"{self._what} {name}: expected one file to register it, not both {files}")
            self._factories[name] = factory
            self._needs[name] = frozenset(needs)
            return factory

        return add

    def forget(self, file: str) -> None:
        """Unregister all factories of a file."""
        names = [name for name, factory in self._factories.items() if file_of(factory) == file]
        for name in names:
            del self._factories[name], self._needs[name]

    def needing(self, need: str) -> list[str]:
        """Return the names for which the program must prepare `need`."""
        return [name for name in self if need in self._needs[name]]

    def __iter__(self) -> Iterator[str]:
        first = [name for name in self._order if name in self._factories]
        return iter(dict.fromkeys((*first, *self._factories)))

    def __contains__(self, name: str) -> bool:
        return name in self._factories

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._factories:
            one_of(self._what, name, self)
        return self._factories[name]

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the options of a name, in the order of its parameters; annotations are resolved to types."""
        factory = self[name]
        parameters = inspect.signature(factory).parameters.values()
        options = [parameter for parameter in parameters if parameter.name not in self._given]
        for option in options:
            if option.annotation is inspect.Parameter.empty:
                signature = f"{file_of(factory)}: {factory.__name__}({option})"
                raise ValueError(f"{signature}: {self._what} {name}: expected a type, such as {option.name}: int = 3")
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
        return {option.name: option.replace(annotation=hints[option.name]) for option in options}

    def needs_options(self, name: str) -> bool:
        """Return whether an option of a name has no default."""
        return any(option.default is inspect.Parameter.empty for option in self.options(name).values())

    def check(
        self, path: str, kind: str, keys: Options, more: Options, chosen: str = "", below: str = "options"
    ) -> None:
        """Raise ValueError for options that are unknown to `kind`, of a wrong type, or missing.

        `path`    key of the settings that hold `kind`, such as arms.mine.placement
        `keys`    options that are keys of these settings; None: not set
        `more`    options below `path`.`below`
        `chosen`  KEY=VALUE that selects `kind`; empty: kind=`kind`
        """
        options, chosen = self.options(kind), chosen or f"kind={kind}"
        named = f"{path.rpartition('.')[2]}.{chosen}"
        for key, value in keys.items():
            if value is not None and key not in options:
                takers = ", ".join(name for name in self if key in self.options(name))
                expected = f"expected {path}.{key}=null, for it goes with {takers or 'nothing'}"
                raise ValueError(f"{path}.{key}{_shown(value)} with {named}: {expected}")
        free = [name for name in options if name not in keys]
        for key, value in more.items():
            if key not in free:
                raise ValueError(f"{path}.{below}.{key}: no such option of {kind}; expected {_listed(free)}")
            if not is_instance(value, options[key].annotation):
                raise ValueError(f"{path}.{below}.{key}={value}: expected {type_name(options[key].annotation)}")
        for name, option in options.items():
            if option.default is inspect.Parameter.empty and keys.get(name) is None and name not in more:
                key = name if name in keys else f"{below}.{name}"
                raise ValueError(f"{path}.{chosen} needs {path}.{key}: expected {type_name(option.annotation)}")

    def takes(self, name: str, parameter: str) -> bool:
        """Return whether the factory of a name has this parameter."""
        return parameter in inspect.signature(self[name]).parameters

    def make(self, name: str, keys: Options, more: Options, **given: object) -> T:
        """Call the factory of a name with its options, and with those of `given` that it has parameters for.

        `keys`  options as for `check`; None: not set
        `more`  further options; None is a value
        """
        filled = {key: value for key, value in given.items() if self.takes(name, key)}
        return self[name](**filled, **{key: value for key, value in keys.items() if value is not None}, **more)

    def is_plugin(self, name: str) -> bool:
        """Return whether a plugin has registered the name."""
        return self[name].__module__.partition(".")[0] not in PACKAGES


def forget(file: str) -> None:
    """Unregister all factories of a file, in all registries."""
    for registry in _registries:
        registry.forget(file)


def file_of(factory: Callable[..., Any]) -> str:
    """Return the file that defines a function or a class."""
    return str(getattr(sys.modules[factory.__module__], "__file__", factory.__module__))


def _listed(names: list[str]) -> str:
    return f"one of {', '.join(names)}" if names else "none"


def _shown(value: object) -> str:
    return f"={value}" if isinstance(value, (int, float, str, Path)) else ""


def _kinds(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) is types.UnionType
    return get_args(annotation) if union else (annotation,)


def is_instance(value: object, annotation: Any) -> bool:
    """Return whether a value has the annotated type; a whole number is a number too."""
    kinds = tuple(get_origin(kind) or kind for kind in _kinds(annotation))
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def type_name(annotation: Any) -> str:
    """Return the words for a type in errors."""
    kinds = [get_origin(kind) or kind for kind in _kinds(annotation) if kind is not type(None)]
    return " or ".join(_TYPE_NAMES.get(kind, f"its keys ({kind.__name__})") for kind in kinds)


# ------------------------------------------------------------------------------
# Entries: what `-cn NAME` runs.
# ------------------------------------------------------------------------------


RunFunction = TypeVar("RunFunction", bound=Callable[[Any, str, Path], object])


@dataclass(frozen=True)
class Entry:
    """A kind of program that an entry of conf/ starts.

    `schema`       dataclass of its settings; entries inherit `base_NAME`
    `run`          function of the settings, the name of the run and the folder of outputs; False is exit code 1
    `environment`  the environment that has its packages; None: any
    `check`        function of the settings and the folder of outputs that `--dry` calls
    """

    schema: type[Any]
    run: Callable[[Any, str, Path], object]
    environment: str | None = None
    check: Callable[[Any, Path], object] | None = None


ENTRIES: dict[str, Entry] = {}


def entry(
    name: str,
    schema: type[Any],
    environment: str | None = None,
    check: Callable[[Any, Path], object] | None = None,
) -> Callable[[RunFunction], RunFunction]:
    """Register a function as the program of the entries that inherit `base_NAME`."""

    def register(run: RunFunction) -> RunFunction:
        ENTRIES[name] = Entry(schema, run, environment, check)
        return run

    return register


def entry_of(settings: object) -> Entry:
    """Return the entry whose schema the settings have."""
    return next(entry for entry in ENTRIES.values() if type(settings) is entry.schema)
