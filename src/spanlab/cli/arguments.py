"""Parse the command line before Hydra: options that start no run, and overrides with unclear Hydra errors."""

from __future__ import annotations

from argparse import ArgumentError, Namespace
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from spanlab.cli.describe import entries, list_keys
from spanlab.settings import schemas

_QUOTED = """a value with spaces, commas or brackets needs two pairs of quotes, as in 'output.root="my folder"'"""


@dataclass(frozen=True)
class CommandLine:
    """The parsed command line.

    `arguments`  arguments for Hydra
    `overrides`  KEY=VALUE arguments
    `entry`      name of the entry
    `many`       -m: several jobs
    `asks`       an option instead of a run: dry, version, help or list; empty: run
    `kind`       the argument of --list
    `searched`   a folder of further choices (--config-dir)
    """

    arguments: list[str]
    overrides: list[str]
    entry: str
    many: bool
    asks: str
    kind: str
    searched: str | None


def read(arguments: list[str]) -> CommandLine:
    """Parse a command line; ValueError for an argument that is no KEY=VALUE."""
    for_hydra, asks, kind = _split_options(arguments)
    parsed = _parsed(for_hydra)
    keys = {key for (group, _), schema in schemas().items() if group is None for key in list_keys(schema)}
    spelled = {word: _as_list(word, keys, parsed.multirun) for word in parsed.overrides}
    for word in spelled.values():
        _check(word)
    asks = asks or ("help" if parsed.help else "")
    words = [spelled.get(word, word) for word in for_hydra]
    entry = parsed.config_name or "smoke"
    return CommandLine(words, list(spelled.values()), entry, parsed.multirun, asks, kind, parsed.config_dir)


def _split_options(arguments: list[str]) -> tuple[list[str], str, str]:
    """Return the arguments for Hydra, the option that starts no run (dry, version, list), and the kind of --list."""
    if "--version" in arguments:
        return [], "version", ""
    if "--list" in arguments:
        index = arguments.index("--list")
        kind = arguments[index + 1] if index + 1 < len(arguments) else ""
        return arguments[:index] + arguments[index + 2 :], "list", kind
    others = [word for word in arguments if word != "--dry"]
    return others, "dry" if len(others) < len(arguments) else "", ""


def _parsed(arguments: list[str]) -> Namespace:
    parser = get_args_parser()
    parser.exit_on_error = False  # which Hydra's function has no parameter for
    try:
        parsed, unknown = parser.parse_known_intermixed_args(arguments)
    except ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from error
    if unknown:
        raise ValueError(f"{unknown[0]}: no such option; expected --dry, --list, --version, --help, --cfg or -m")
    return parsed


def _check(word: str) -> None:
    """Raise ValueError for an argument that sets no key, with the probable intention."""
    if "=" in word or word.startswith("~"):
        try:
            OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ValueError(f"{word}: expected KEY=VALUE; {_QUOTED}") from error
        return
    if word in entries():
        raise ValueError(f"{word} is an entry: expected -cn {word}")
    if word == "help":
        raise ValueError("help: expected --help, or -cn ENTRY --help for the keys of an entry")
    raise ValueError(f"{word}: expected KEY=VALUE, GROUP=CHOICE or -cn ENTRY; {_QUOTED}")


def _as_list(word: str, keys: set[str], many: bool) -> str:
    """Return `only=dp_3` as `only=[dp_3]`; with -m `seeds=0,1` becomes `seeds=[0],[1]`."""
    key, _, value = word.partition("=")
    if key == "fail_on" and set(value) & set("<>") and value[0] not in "'\"":
        return f"{key}='{value}'"  # Hydra has no < in words
    is_list = any(fnmatchcase(key.lstrip("+"), pattern) for pattern in keys)
    if not is_list or not value or value == "null" or set(value) & set("[{(\"'$"):
        return word
    if "=" in value:
        return f'{key}=["{value}"]'
    lists = [f"[{item}]" for item in value.split(",")] if many else [f"[{value}]"]
    return f"{key}={','.join(lists)}"
