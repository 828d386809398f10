"""The command line before Hydra sees it: what asks for no run, and words that Hydra would not explain."""

from __future__ import annotations

from argparse import Namespace
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
    """What was typed.

    `arguments`  what Hydra gets
    `overrides`  KEY=VALUE words
    `entry`      name of the entry
    `many`       -m: several jobs
    `asks`       what was asked for instead of a run: dry, version, help or list; empty where nothing was
    `kind`       what --list was asked for
    `searched`   a folder of the user's own choices
    """

    arguments: list[str]
    overrides: list[str]
    entry: str
    many: bool
    asks: str
    kind: str
    searched: str | None


def read(arguments: list[str]) -> CommandLine:
    """Read a command line; ValueError for a word that is no KEY=VALUE."""
    kept, asks, kind = _without_questions(arguments)
    given = _parsed(kept)
    keys = {key for (group, _), schema in schemas().items() if group is None for key in list_keys(schema)}
    spelled = {word: _as_list(word, keys, given.multirun) for word in given.overrides}
    for word in spelled.values():
        _check(word)
    asks = asks or ("help" if given.help else "")
    words = [spelled.get(word, word) for word in kept]
    entry = given.config_name or "smoke"
    return CommandLine(words, list(spelled.values()), entry, given.multirun, asks, kind, given.config_dir)


def _without_questions(arguments: list[str]) -> tuple[list[str], str, str]:
    """The arguments without --dry, --version and --list KIND; which of them is there; KIND."""
    if "--version" in arguments:
        return [], "version", ""
    if "--list" in arguments:
        at = arguments.index("--list")
        kind = arguments[at + 1] if at + 1 < len(arguments) else ""
        return arguments[:at] + arguments[at + 2 :], "list", kind
    kept = [word for word in arguments if word != "--dry"]
    return kept, "dry" if len(kept) < len(arguments) else "", ""


def _parsed(arguments: list[str]) -> Namespace:
    parsed, strange = get_args_parser().parse_known_intermixed_args(arguments)
    if strange:
        raise ValueError(f"{strange[0]}: no such option; expected --dry, --list, --version, --help, --cfg or -m")
    return parsed


def _check(word: str) -> None:
    """Refuse a word that sets nothing, with what was probably meant."""
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
    """`only=dp_3` as `only=[dp_3]`; with -m each of `seeds=0,1` is a list of its own."""
    key, _, value = word.partition("=")
    if key == "fail_on" and set(value) & set("<>") and value[0] not in "'\"":
        return f"{key}='{value}'"  # Hydra has no < in words
    is_list = any(fnmatchcase(key.lstrip("+"), pattern) for pattern in keys)
    if not is_list or not value or value == "null" or set(value) & set("[{(\"'$"):
        return word
    if "=" in value:
        return f'{key}=["{value}"]'
    lists = [f"[{part}]" for part in value.split(",")] if many else [f"[{value}]"]
    return f"{key}={','.join(lists)}"
