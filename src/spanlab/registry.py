"""Things that settings choose by name: each is registered beside its code, and its parameters are its options."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from spanlab.checks import one_of

T = TypeVar("T")
Made = TypeVar("Made", bound=Callable[..., Any])
Options = Mapping[str, Any]

_WORDS: dict[Any, str] = {
    Path: "a file or folder",
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
}


_OWN = ("spanlab", "spanlab_sim", "spanlab_kernels")  # packages that are no plugins

_registries: list[Registry[Any]] = []


class Registry(Generic[T]):
    """Functions or classes by name; they return a T.

    `what`   what is registered, in words
    `given`  parameters that the program fills in; every other one is an option, which settings may set
    """

    def __init__(self, what: str, given: tuple[str, ...] = ()) -> None:
        self._what, self._given = what, given
        self._found: dict[str, Callable[..., T]] = {}
        self._elsewhere: dict[str, str] = {}
        self._needs: dict[str, frozenset[str]] = {}
        _registries.append(self)

    def register(self, name: str, needs: Iterable[str] = ()) -> Callable[[Made], Made]:
        """Decorate what `name` stands for; ValueError where another file has the name already.

        `needs`  what the program must prepare for it; of a name announced by `later`, that says it
        """

        def add(made: Made) -> Made:
            earlier = self._found.get(name)
            if earlier is not None and file_of(earlier) != file_of(made):
                files = f"{file_of(earlier)} and {file_of(made)}"
                raise ValueError(f"{self._what} {name}: expected one file to register it, not both {files}")
            self._found[name] = made
            self._needs.setdefault(name, frozenset(needs))
            return made

        return add

    def forget(self, file: str) -> None:
        """Forget what a file has registered."""
        gone = [name for name, made in self._found.items() if file_of(made) == file]
        for name in gone:
            del self._found[name]
            if name not in self._elsewhere:
                del self._needs[name]

    def later(self, name: str, module: str, needs: Iterable[str] = ()) -> None:
        """Announce a name that `module` registers; the module is imported when the name is first looked up."""
        self._elsewhere[name] = module
        self._needs[name] = frozenset(needs)

    def needing(self, need: str) -> list[str]:
        """Names for which the program must prepare `need`."""
        return [name for name in self if need in self._needs[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._elsewhere, *self._found)))

    def __contains__(self, name: str) -> bool:
        return name in self._found or name in self._elsewhere

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._found:
            one_of(self._what, name, self)
            import_module(self._elsewhere[name])
        return self._found[name]

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The options of a name, in the order of its parameters; annotations are types."""
        made = self[name]
        hints = get_type_hints(made.__init__ if inspect.isclass(made) else made)
        parameters = inspect.signature(made).parameters.values()
        return {one.name: one.replace(annotation=hints[one.name]) for one in parameters if one.name not in self._given}

    def needs_options(self, name: str) -> bool:
        """Whether an option of it has no default."""
        return any(option.default is inspect.Parameter.empty for option in self.options(name).values())

    def check(
        self, path: str, kind: str, keys: Options, more: Options, chosen: str = "", below: str = "options"
    ) -> None:
        """Refuse options that `kind` does not take, that are of a wrong type, or that are missing.

        `path`  the key of the settings that hold `kind`, as arms.mine.placement
        `keys`  options that have keys of their own there; None is not set
        `more`  options below `path`.options, or another key `below` the path
        `chosen`  the keys that chose `kind`; empty where the key is kind
        """
        taken, chosen = self.options(kind), chosen or f"kind={kind}"
        named = f"{path.rpartition('.')[2]}.{chosen}"
        for key, value in keys.items():
            if value is not None and key not in taken:
                takers = ", ".join(name for name in self if key in self.options(name))
                expected = f"expected {path}.{key}=null, for it goes with {takers or 'nothing'}"
                raise ValueError(f"{path}.{key}{_shown(value)} with {named}: {expected}")
        free = [name for name in taken if name not in keys]
        for key, value in more.items():
            if key not in free:
                raise ValueError(f"{path}.{below}.{key}: no such option of {kind}; expected {_listed(free)}")
            if not _fits(value, taken[key].annotation):
                raise ValueError(f"{path}.{below}.{key}={value}: expected {_type_in_words(taken[key].annotation)}")
        for name, option in taken.items():
            if option.default is inspect.Parameter.empty and keys.get(name) is None and name not in more:
                where = name if name in keys else f"{below}.{name}"
                raise ValueError(f"{path}.{chosen} needs {path}.{where}: expected {_type_in_words(option.annotation)}")

    def takes(self, name: str, parameter: str) -> bool:
        """Whether a name has a parameter, an option or one that the program fills in."""
        return parameter in inspect.signature(self[name]).parameters

    def make(self, name: str, keys: Options, more: Options, **given: object) -> T:
        """Call what a name stands for with its options, and with as much of `given` as it has parameters for.

        `keys`  as for `check`; None is not set
        `more`  further options; None is a value
        """
        filled = {key: value for key, value in given.items() if self.takes(name, key)}
        return self[name](**filled, **{key: value for key, value in keys.items() if value is not None}, **more)

    def is_plugin(self, name: str) -> bool:
        """Whether a name was registered outside this package and the simulator."""
        return self[name].__module__.partition(".")[0] not in _OWN


def forget(file: str) -> None:
    """Forget what a file has registered anywhere."""
    for registry in _registries:
        registry.forget(file)


def file_of(made: Callable[..., Any]) -> str:
    """The file that defines a function or a class."""
    return str(getattr(sys.modules[made.__module__], "__file__", made.__module__))


def _listed(names: list[str]) -> str:
    return f"one of {', '.join(names)}" if names else "none"


def _shown(value: object) -> str:
    return f"={value}" if isinstance(value, (int, float, str, Path)) else ""


def _kinds(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) is types.UnionType
    return get_args(annotation) if union else (annotation,)


def _fits(value: object, annotation: Any) -> bool:
    kinds = tuple(get_origin(kind) or kind for kind in _kinds(annotation))
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _type_in_words(annotation: Any) -> str:
    kinds = [get_origin(kind) or kind for kind in _kinds(annotation) if kind is not type(None)]
    return " or ".join(_WORDS.get(kind, f"its keys ({kind.__name__})") for kind in kinds)
