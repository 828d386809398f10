"""Registries of functions and classes that settings choose by name, and plugins, which register
more of them.

The parameters of a registered function are its options.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

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
    """Raise ValueError for a value that does not go with a choice; `expected` has key, value,
    required value."""
    for key, value, required in expected:
        if value != required:
            raise ValueError(f"{key}={value} with {chosen}: expected {required}")


def refuse_unknown_keys(settings: object, path: str = "") -> None:
    """Raise ValueError for keys that are in no schema: `+key=value` on the command line can add
    them."""
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


@dataclass(frozen=True)
class Bounds:
    """A check of a number: Bounds(key, value) raises ValueError for one that is not accepted; None
    passes.

    `words`    what is expected, for errors and docs/configuration.md
    `accepts`  whether a number is within the bounds
    """

    words: str
    accepts: Callable[[float], bool]

    def __call__(self, key: str, value: float | None) -> None:
        """Raise ValueError for a number out of bounds."""
        if value is not None and not self.accepts(value):
            raise ValueError(f"{key}={value}: expected {self.words}")


positive = Bounds("a number above zero", lambda value: 0 < value < math.inf)
not_negative = Bounds("zero or more", lambda value: 0 <= value < math.inf)
share = Bounds("a share from 0 to 1", lambda value: 0 <= value <= 1)
share_above_zero = Bounds("a share above 0 and up to 1", lambda value: 0 < value <= 1)
share_below_one = Bounds("a share from 0 to below 1", lambda value: 0 <= value < 1)


def within(least: int, most: int) -> Bounds:
    """Return the check of a whole number with both limits included."""
    return Bounds(f"a whole number from {least} to {most}", lambda value: least <= value <= most)


def at_most(most: float) -> Callable[[str, float], None]:
    """Return the check of a number above zero with an upper limit, which its error names alone."""
    limit = Bounds(f"at most {most:,.0f}", lambda value: value <= most)

    def check(key: str, value: float) -> None:
        positive(key, value)
        limit(key, value)

    return check


def check_seeds(key: str, seeds: list[int]) -> None:
    """Raise ValueError for no seeds, repeated, negative or too large ones."""
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0 or max(seeds) >= 1 << 63:
        raise ValueError(
            f"{key}={seeds}: expected one or more different numbers from 0 to 2^63 - 1"
        )


def summary_of(documented: object) -> str:
    """Return the first paragraph of a docstring in one line; empty without one."""
    return " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())


def among(value: str, choices: Iterable[str]) -> str:
    """Return the list of choices with the nearest one, ignoring case; for a former name, its
    present name.

    The list of no choices is "none".
    """
    choices, word = tuple(choices), value.lower()
    if not choices:
        return "none"
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


# ------------------------------------------------------------------------------
# Keys of settings, each with its default, check and meaning.
# ------------------------------------------------------------------------------

Check = Callable[[str, Any], None] | Iterable[str] | None


def field(default: Any, check: Check, meaning: str, example: Any = None) -> Any:
    """Declare a key of settings.

    `default`  the default, or the class that makes it; REQUIRED: none
    `check`    raises ValueError for (key, value), or the names to choose from; None: any value
    `meaning`  one phrase for --help and docs/configuration.md
    `example`  value that the choice of a kind alone sets, as arrivals=poisson
    """
    metadata = {"check": check, "meaning": meaning, "example": example}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_keys(settings: Any, key_of: Callable[[str], str], chosen: str) -> None:
    """Raise ValueError for a required key that is not set, and for a value that its field refuses.

    `key_of`  full key of a field
    `chosen`  KEY=VALUE that selects the class of the settings
    """
    for key in fields(settings):
        value, check = getattr(settings, key.name), key.metadata.get("check")
        if value == REQUIRED:
            expected = type_name(get_type_hints(type(settings))[key.name])
            raise ValueError(f"{chosen} needs {key_of(key.name)}: expected {expected}")
        if value is None or check is None:
            continue
        if callable(check):
            check(key_of(key.name), value)
        else:
            for name in value if isinstance(value, list) else (value,):
                one_of(key_of(key.name), name, check)


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
    dict: "values by name",
}


_ARM = re.compile(r"^arms\.[^.]+\.")
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
        self._schemas: dict[Any, Any] = {}
        _registries.append(self)

    def register(self, name: str, needs: Iterable[str] = ()) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a factory; ValueError if another file has registered
        the name.

        `needs`  inputs that the program must prepare
        """

        def add(factory: Factory) -> Factory:
            earlier = self._factories.get(name)
            if earlier is not None and file_of(earlier) != file_of(factory):
                files = f"{file_of(earlier)} and {file_of(factory)}"
                raise ValueError(
                    f"{self._what} {name}: expected one file to register it, not both {files}"
                )
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

    def schema(self, name: str) -> Any:
        """Return a dataclass of the options of a name: of each the type, default, bounds or
        choices, and meaning.

        A parameter declares the last two: `alpha: Annotated[float, positive, "weight of the
        recency"] = 1.0`.
        """
        factory: Any = self[name]
        if factory not in self._schemas:
            parameters = inspect.signature(factory).parameters.values()
            options = [parameter for parameter in parameters if parameter.name not in self._given]
            annotated = factory.__init__ if inspect.isclass(factory) else factory
            hints = get_type_hints(annotated, include_extras=True) if options else {}
            keys = []
            for parameter in options:
                if parameter.annotation is inspect.Parameter.empty:
                    expected = f"expected a type, such as {parameter.name}: int = 3"
                    where = f"{file_of(factory)}: {factory.__name__}({parameter})"
                    raise ValueError(f"{where}: {self._what} {name}: {expected}")
                hint = hints[parameter.name]
                declared: tuple[Any, ...] = getattr(hint, "__metadata__", ())
                meaning = next((word for word in declared if isinstance(word, str)), "")
                check = next((check for check in declared if not isinstance(check, str)), None)
                default = (
                    REQUIRED if parameter.default is inspect.Parameter.empty else parameter.default
                )
                keys.append(
                    (
                        parameter.name,
                        get_args(hint)[0] if declared else hint,
                        field(default, check, meaning),
                    )
                )
            self._schemas[factory] = make_dataclass(name, keys)
        return self._schemas[factory]

    def needs_options(self, name: str) -> bool:
        """Return whether an option of a name has no default."""
        return any(key.default == REQUIRED for key in fields(self.schema(name)))

    def check(
        self,
        path: str,
        name: str,
        chosen: str,
        options: Options,
        keys: Options = MappingProxyType({}),
    ) -> None:
        """Raise ValueError for options of other names, of other types or out of bounds, and for
        missing ones.

        `path`    key of the section that holds `options`, such as arms.mine.placement.options
        `chosen`  KEY=VALUE that selects the name
        `keys`    options that stand beside that section, as arms.mine.placement.interval; None: not
                  set
        """

        def key_of(key: str) -> str:
            return f"{path.rpartition('.')[0] if key in keys else path}.{key}"

        given = {key: value for key, value in keys.items() if value is not None} | dict(options)
        schema = self.schema(name)
        hints = {key.name: key.type for key in fields(schema)}
        for key, value in given.items():
            if key not in hints or (key in keys and key in options):
                takers = ", ".join(
                    other
                    for other in self
                    if key in {key.name for key in fields(self.schema(other))}
                )
                if key not in options:
                    expected = (
                        f"expected {key_of(key)}=null, for it goes with {takers or 'nothing'}"
                    )
                    shown = f"={value}" if isinstance(value, (int, float, str, Path)) else ""
                    raise ValueError(
                        f"{key_of(key)}{shown} with {_ARM.sub('', chosen)}: {expected}"
                    )
                expected = among(key, [option for option in hints if option not in keys])
                others = f", for it goes with {takers}" if takers else ""
                raise ValueError(
                    f"{path}.{key}: no such option of {name}; expected {expected}{others}"
                )
            if not is_instance(value, hints[key]):
                raise ValueError(f"{key_of(key)}={value}: expected {type_name(hints[key])}")
        check_keys(schema(**given), key_of, chosen)

    def takes(self, name: str, parameter: str) -> bool:
        """Return whether the factory of a name has this parameter."""
        return parameter in inspect.signature(self[name]).parameters

    def make(self, name: str, keys: Options, more: Options, **given: object) -> T:
        """Call the factory of a name with its options, and with those of `given` that it has
        parameters for.

        `keys`  options; None: not set
        `more`  further options; None is a value
        """
        filled = {key: value for key, value in given.items() if self.takes(name, key)}
        return self[name](
            **filled, **{key: value for key, value in keys.items() if value is not None}, **more
        )

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


def expected_of(annotation: Any, check: Check) -> str:
    """Return the words for the values that a key takes: its choices, or its type and bounds."""
    null = ", or null" if type(None) in _kinds(annotation) else ""
    if check is not None and not callable(check):
        return f"one of {', '.join(check)}{null}"
    return f"{type_name(annotation)}{bounds_of(check)}{null}"


def bounds_of(check: Check) -> str:
    """Return the words for bounds, to be put behind those for a type; empty for other checks."""
    words = check.words if isinstance(check, Bounds) else ""
    return (
        words.removeprefix("a number")
        if words.startswith("a number")
        else f", {words}"
        if words
        else ""
    )


# ------------------------------------------------------------------------------
# Entries: what `-cn NAME` runs.
# ------------------------------------------------------------------------------


RunFunction = TypeVar("RunFunction", bound=Callable[[Any, str, Path], object])
Environment = str | Callable[[Any], str | None] | None


@dataclass(frozen=True)
class Entry:
    """A kind of program that an entry of conf/ starts.

    `schema`       dataclass of its settings; entries inherit `base_NAME`
    `run`          function of the settings, the name of the run and the folder of outputs; False is
                   exit code 1
    `environment`  the environment that has its packages, or a function of the settings; None: any
    `check`        function of the settings and the folder of outputs that `--dry` calls
    `resumes`      whether output.if_exists=resume continues an interrupted run
    """

    schema: type[Any]
    run: Callable[[Any, str, Path], object]
    environment: Environment = None
    check: Callable[[Any, Path], object] | None = None
    resumes: bool = False


ENTRIES: dict[str, Entry] = {}


def entry(
    name: str,
    schema: type[Any],
    environment: Environment = None,
    check: Callable[[Any, Path], object] | None = None,
    resumes: bool = False,
) -> Callable[[RunFunction], RunFunction]:
    """Register a function as the program of the entries that inherit `base_NAME`."""

    def register(run: RunFunction) -> RunFunction:
        ENTRIES[name] = Entry(schema, run, environment, check, resumes)
        return run

    return register


def entry_of(settings: object) -> Entry:
    """Return the entry whose schema the settings have."""
    return next(entry for entry in ENTRIES.values() if type(settings) is entry.schema)


# ------------------------------------------------------------------------------
# Plugins: Python files and modules of users, which register policies, workloads, timing models or
# figures.
# ------------------------------------------------------------------------------


class _Loaded(NamedTuple):
    """A plugin that this process has loaded: its file, and the hash of its contents."""

    file: str
    contents: str


_loaded: dict[str, _Loaded] = {}
_files: set[str] = set()  # of every plugin that this process has run, modules included


def located(name: str) -> str:
    """Return a name that is valid in every process: the absolute path of a file, or the name of a
    module."""
    return str(Path(name).resolve()) if _is_file(name) else name


def load_plugins(names: Iterable[str]) -> None:
    """Import these plugins and unregister all others: another study may use the same names for
    other files.

    An unchanged file stays loaded. A module stays loaded too: other modules may have imported it,
    and Python runs each module once. Raises ValueError if a plugin fails.
    """
    specs = {name: _find(name) for name in map(located, names)}
    for name, loaded in list(_loaded.items()):
        if name not in specs or specs[name][1] != loaded.contents:
            forget(loaded.file)
            del _loaded[name]
    for name, (spec, contents) in specs.items():
        _files.add(str(spec.origin))
        if not _is_file(name):
            try:
                import_module(name)
            except (Exception, SystemExit) as error:  # a user's code may raise anything
                raise _failed(name, error) from error
        elif name not in _loaded:
            _run(name, spec)
            _loaded[name] = _Loaded(str(spec.origin), contents)


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each plugin's file by name, for the provenance of a run."""
    return {name: _find(located(name))[1] for name in names}


def _is_file(name: str) -> bool:
    return name.endswith(".py") or "/" in name


def _module_name(file: str) -> str:
    """Return a module name that is unique, also among files with equal names."""
    return f"plugin_{Path(file).stem}_{hashlib.sha256(file.encode()).hexdigest()[:8]}"


def _find(name: str) -> tuple[ModuleSpec, str]:
    """Return the import spec of a plugin, and the hash of its file."""
    expected = "expected a Python file, or a module that can be imported"
    try:
        spec = (
            spec_from_file_location(_module_name(name), name) if _is_file(name) else find_spec(name)
        )
        if spec is None or spec.origin is None:
            raise ValueError(f"plugins={name}: no module of this name; {expected}")
        return spec, hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except (OSError, ImportError) as error:
        raise ValueError(f"plugins={name}: {error}; {expected}") from error


def _run(name: str, spec: ModuleSpec) -> None:
    assert spec.loader is not None, "a file has a loader"
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        forget(str(spec.origin))
        del sys.modules[spec.name]
        raise _failed(name, error) from error


#: Modules that plugins import, by their name in version 0.1 before files were merged.
MOVED = {
    "spanlab.checks": "spanlab.registry",
    "spanlab.core.cost": "spanlab.model_spec",
    "spanlab.core.recovery": "spanlab.core.rules",
    "spanlab.core.reuse": "spanlab.core.plan",
    "spanlab.core.eviction.contract": "spanlab.core.eviction",
    "spanlab.core.placement.contract": "spanlab.core.placement",
    "spanlab.models": "spanlab.model_files",
    "spanlab.report.cells": "spanlab.report.table",
    "spanlab.report.drawing": "spanlab.report.style",
    "spanlab.report.fields": "spanlab.report.table",
    "spanlab.report.measures": "spanlab.report.data",
    "spanlab.report.tables": "spanlab.report.table",
    "spanlab.report.units": "spanlab.report.table",
    "spanlab.settings.plan": "spanlab.settings.analyses",
    "spanlab.steady": "spanlab.stats",
    "spanlab.study.findings": "spanlab.analyses.base",
    "spanlab.workloads.corpus": "spanlab.workloads.workload",
    "spanlab.workloads.source": "spanlab.workloads.workload",
}


def _failed(name: str, error: BaseException) -> ValueError:
    """Return the user error for an exception that a plugin raised."""
    if isinstance(error, ImportError):
        for old, new in MOVED.items():
            # a folder of an earlier checkout, with its bytecode alone, can still be imported
            if f"{error.name}.".startswith(f"{old}."):
                return ValueError(f"plugins={name}: {old} has moved; expected an import from {new}")
    return ValueError(
        f"plugins={name}: {type(error).__name__}: {error}; expected a file that can be run"
    )


class PluginError(ValueError):
    """Code of a plugin raised an error, or ended the program."""


@contextmanager
def named_errors() -> Iterator[None]:
    """Raise errors of plugins as PluginError with file and line; a user error gets them as a
    note."""
    try:
        yield
    except (Exception, SystemExit) as error:
        origin, location = _origin(error)
        if not location or isinstance(error, PluginError):
            raise
        if isinstance(error, (ValueError, OSError, MemoryError)):
            if not any("raised in" in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"raised in {location}")
            raise
        raise PluginError(
            f"plugins={location}: {_described(origin)}; SPANLAB_TRACEBACK=1 shows the traceback"
        ) from error


def _origin(error: BaseException) -> tuple[BaseException, str]:
    """The first of an error's causes that passed a plugin, with file and line of the innermost call
    of the plugin.

    The location is empty where no plugin was called. The simulator's event loop raises a copy of an
    error, whose cause is the error itself.
    """
    if error.__cause__ is not None:
        origin, location = _origin(error.__cause__)
        if location:
            return origin, location
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return error, next((f"{file}:{line}" for file, line in reversed(lines) if file in _files), "")


def _described(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"it ended the program with {error.code!r}; expected a return value, or an error"
    names = (
        [name for name in dir(error.obj) if name[0] != "_"]
        if isinstance(error, AttributeError)
        else []
    )
    expected = (
        f"; expected {among(str(error.name), names)}"
        if names and isinstance(error, AttributeError)
        else ""
    )
    return f"{type(error).__name__}: {' '.join(str(error).split())}{expected}"
