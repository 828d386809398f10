"""The command line: entries of conf/, their settings, descriptions, environments and errors."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import signal
import sys
from argparse import ArgumentError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, cast, get_args, get_origin

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from spanlab import analyses  # noqa: F401 - registers them
from spanlab.compiled import CONF, HOME, restart_as
from spanlab.errors import is_user_error, sentence, with_notes
from spanlab.kinds import Kinds, default_of, kinds_of, schema_of_kind, shown
from spanlab.model_files import ENVIRONMENT
from spanlab.provenance import version
from spanlab.registry import (
    ENTRIES,
    REQUIRED,
    Registry,
    entry,
    entry_of,
    expected_of,
    load_plugins,
    one_of,
    summary_of,
)
from spanlab.settings.analyses import PATHS, short_key, with_short_keys
from spanlab.settings.arms import Strategy
from spanlab.settings.composition import (
    as_settings,
    check_folder,
    choices_without_file,
    compose_entry,
    compose_run,
    explained,
    full_words,
    hints_of,
    register,
    schema_of,
    schemas,
    with_sections,
    without_sections,
)
from spanlab.settings.server import OutputSettings
from spanlab.settings.study import Study, lacks_package
from spanlab.study import (  # noqa: F401 - register their entries
    compare,
    conformance,
    conformance_cases,
    export,
    first_light,
    schedule,
    watch,
)
from spanlab.study.folder import folder_name, use_ascii_fallback
from spanlab.workloads import make_shape  # noqa: F401 - registers its entry

# ------------------------------------------------------------------------------
# Text of --list and --help: entries, groups, registered names, and the keys of an entry with
# their meanings.
# ------------------------------------------------------------------------------

MEANING = re.compile(r"^((?:`[\w*]+`(?:, )?)+) +(\S.*)$")
_USAGE = """\
spanlab: a laboratory for KV-cache reuse in LLM serving

    bash runall.sh -cn ENTRY [GROUP=CHOICE ...] [KEY=VALUE ...]

    --dry        check the settings and say what would run
    --list WHAT  list {kinds}
    --cfg job    print the settings as YAML
    -m           run every combination of KEY=A,B,C
    --version    print version and commit

Entries:
{entries}

Groups and their choices (--list GROUP explains them):
{groups}

Keys of {entry}, with their values there:
{keys}"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file's first comment."""
    lines: list[str] = []
    for line in path.read_text().splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            lines.append(line.lstrip("# "))
        elif lines:
            break
    return re.split(r"(?<=\.) ", " ".join(lines))[0]


def meanings_of(schema: type[Any]) -> dict[str, str]:
    """Return the meaning of each key: as its field declares it, or from the docstrings of a schema
    and its bases."""
    declared = {
        key.name: key.metadata["meaning"] for key in fields(schema) if "meaning" in key.metadata
    }
    meanings: dict[str, str] = declared
    for base in schema.__mro__[:-1]:
        names: list[str] = []
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            if entry := MEANING.match(line):
                names = [
                    name for name in re.findall(r"`([\w*]+)`", entry[1]) if name not in meanings
                ]
                meanings |= dict.fromkeys(names, entry[2])
            elif line.startswith("  "):
                meanings |= {name: f"{meanings[name]} {line.strip()}" for name in names}
            else:
                names = []
    return meanings


def meaning_of(meanings: dict[str, str], key: str) -> str:
    """Return the meaning of a key; empty if no pattern of the docstrings matches it."""
    return next((meaning for pattern, meaning in meanings.items() if fnmatchcase(key, pattern)), "")


def dataclass_in(hint: Any) -> type[Any] | None:
    """Return the dataclass in a type annotation; None if there is none."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and is_dataclass(kind):
            return kind
    return None


def entries() -> list[str]:
    """Return the names of all entries."""
    return list(described(None))


def groups() -> list[str]:
    """Return the names of all config groups: the folders of conf/, and groups whose choices need no
    file."""
    folders = {path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"}
    return sorted(folders | {group for group, _ in choices_without_file() if group})


def described(group: str | None) -> dict[str, str]:
    """Return the choices of a group, None: the entries, with one sentence each."""
    files = (CONF / (group or "")).glob("*.yaml")
    texts = {path.stem: first_sentence(path) for path in files if group or path.stem != "config"}
    texts |= {
        name: choice.meaning for (at, name), choice in choices_without_file().items() if at == group
    }
    return dict(sorted(texts.items()))


def listing(kind: str) -> str:
    """Return one line per entry, choice of a group, or name that a key takes; the plural of a group
    is accepted."""
    kind = next((group for group in groups() if kind in (f"{group}s", f"{group[:-1]}ies")), kind)
    if kind == "entries":
        return _lines(described(None).items())
    if kind in groups():
        return _lines(described(kind).items())
    names = registries()
    one_of("--list", kind, ("entries", *names, *groups()))
    # each name with its meaning, then its options: KEY=DEFAULT, and the values that it takes
    section, registry = f"{kind.rpartition('.')[0]}.", names[kind]
    lines = []
    for name, text in registered(registry).items():
        lines.append((name, text))
        for option, values, default, meaning in options_of(kind, registry, name):
            given = ""
            if default != REQUIRED:
                given = f"={json.dumps(default, default=str)}".replace('"', "")
            lines.append(
                (
                    f"  {option.removeprefix(section)}{given}",
                    f"{values}{'; ' if meaning else ''}{meaning}",
                )
            )
    return _lines(lines)


def options_of(key: str, registry: Registry[Any], name: str) -> Iterator[tuple[str, str, Any, str]]:
    """Yield each option of a name: its full key, the values that it takes, its default (or
    REQUIRED), its meaning.

    `key`  the key that takes the names of the registry; for kinds, keys of every kind are left out
    """
    schema, section, common = registry.schema(name), key.rpartition(".")[0], set[str]()
    if isinstance(registry, Kinds):
        common = {field.name for field in fields(registry.base)}
    options = [field for field in fields(schema) if field.name not in common]
    hints = hints_of(schema) if options else {}
    for field in options:
        below = section if isinstance(registry, Kinds) else _section_of(key, field.name)
        default = default_of(field)
        values = expected_of(hints[field.name], field.metadata.get("check"))
        yield (
            f"{below}.{field.name}",
            values,
            {} if is_dataclass(default) else default,
            field.metadata.get("meaning", ""),
        )


def _section_of(key: str, option: str) -> str:
    """Return the section of an option: that of the key if it has a field of this name, or one of
    options below it."""
    section, _, last = key.rpartition(".")
    first = section.partition(".")[0]
    schema: Any = next(each.schema for each in ENTRIES.values() if first in hints_of(each.schema))
    for word in section.replace(".NAME", "").split("."):
        schema = dataclass_in(hints_of(schema)[word]) or get_args(hints_of(schema)[word])[1]
    kinds = kinds_of(schema)
    names = {field.name for field in fields(schema)} if kinds is None else kinds.all_hints().keys()
    if option in names and schema is not Strategy:  # keys of an arm are no options of its policy
        return section
    return f"{section}.{last}_options" if f"{last}_options" in names else f"{section}.options"


def registries() -> dict[str, Registry[Any]]:
    """Return what a plugin can extend: the registries by the key that takes their names; figures
    have no key."""
    # here, because most commands need none of these modules
    from spanlab.analyses.plan import SEARCHES
    from spanlab.core.admission import ADMISSIONS
    from spanlab.core.eviction.orders import EVICTION_ORDERS
    from spanlab.core.placement.rules import PLACEMENTS
    from spanlab.core.policies.named import POLICIES
    from spanlab.core.rules import RECOVERIES
    from spanlab.model_spec import COSTS
    from spanlab.report.figures import FIGURES
    from spanlab.settings.analyses import ANALYSES
    from spanlab.study.real_server import SERVERS  # its import registers them
    from spanlab.workloads.load import WORKLOADS
    from spanlab.workloads.logs.source import LOG_FORMATS
    from spanlab.workloads.workload import SOURCES
    from spanlab.workloads.writers import WRITERS
    from spanlab_sim.arrivals import ARRIVALS
    from spanlab_sim.routing import ROUTERS
    from spanlab_sim.timings import TIMINGS

    return {
        "figures": FIGURES,
        "arms.NAME.policy": POLICIES,
        "arms.NAME.placement.kind": PLACEMENTS,
        "arms.NAME.eviction": EVICTION_ORDERS,
        "arms.NAME.admission": ADMISSIONS,
        "arms.NAME.recovery": RECOVERIES,
        "arms.NAME.cost": COSTS,
        "workload.kind": WORKLOADS,
        "workload.source": SOURCES,
        "workload.log.format": LOG_FORMATS,
        "arrivals.kind": ARRIVALS,
        "replicas.routing": ROUTERS,
        "server.engine": SERVERS,
        "timing.kind": TIMINGS,
        "analyses": ANALYSES,
        "plan.search": SEARCHES,
        "writer.format": WRITERS,
    }


def registered(registry: Registry[Any]) -> dict[str, str]:
    """Return the names of a registry, also those of loaded plugins, with the summaries of their
    docstrings."""
    return {name: summary_of(registry[name]) for name in registry}


def usage(entry: str, config: Any) -> str:
    """Return the text of --help; `config` is the composed entry."""
    schema = schema_of(config)
    return _USAGE.format(
        kinds="the entries, the choices of a group, or the names that a KEY takes, with those of plugins",
        entries=_lines(described(None).items()),
        groups="\n".join(f"{name}: {', '.join(described(name))}" for name in groups()),
        entry=entry,
        keys=_lines(_keys(schema, config)),
    )


def list_keys(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema that hold lists; `*` stands for the name of an arm."""
    for name, hint in hints_of(schema).items():
        if get_origin(hint) is list:
            yield prefix + name
        elif (schema_below := dataclass_in(hint)) is not None:
            yield from list_keys(
                schema_below, f"{prefix}{name}.{'*.' if get_origin(hint) is dict else ''}"
            )


def _keys(schema: type[Any], config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield KEY=VALUE and the meaning of each key; for arms, the names of the arms."""
    hints, meanings = hints_of(schema), meanings_of(schema)
    for item in fields(schema):
        name, hint = item.name, hints[item.name]
        value = None if config is None else config._get_node(name)
        if value is not None and kinds_of(hint) is not None:
            hint = schema_of_kind(hint, cast(Any, OmegaConf.to_container(value)))
        default = default_of(item)
        meaning = meaning_of(meanings, name)
        below = None if get_origin(hint) is list else dataclass_in(hint)
        key = short_key(f"{prefix}{name}")
        if get_origin(hints[name]) is dict:
            yield key, f"{meaning}: {', '.join(() if value is None else value)}"
        elif below is not None and (
            is_dataclass(default) if value is None else not value._is_none()
        ):
            yield from _keys(below, value, f"{prefix}{name}.")
        else:
            yield f"{key}={shown(default) if value is None else value}", meaning


def _lines(rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    width = min(44, max((len(name) for name, _ in rows), default=0))
    return "\n".join(f"  {name:{width}}  {text}".rstrip() for name, text in rows)


# ------------------------------------------------------------------------------
# Parse the command line before Hydra: options that start no run, and overrides with unclear
# Hydra errors.
# ------------------------------------------------------------------------------

_QUOTED = """a value with spaces, commas or brackets needs two pairs of quotes, as in 'output.root="my folder"'"""


@dataclass(frozen=True)
class CommandLine:
    """The parsed command line.

    `arguments`  arguments for Hydra
    `overrides`  KEY=VALUE arguments
    `entry`      name of the entry
    `many`       -m: several jobs
    `plain`      one run, without an option or a setting that is for Hydra itself
    `asks`       an option instead of a run: dry, version, help or list; empty: run
    `kind`       the argument of --list
    `searched`   a folder of further choices (--config-dir)
    """

    arguments: list[str]
    overrides: list[str]
    entry: str
    many: bool
    plain: bool
    asks: str
    kind: str
    searched: str | None


def read(arguments: list[str]) -> CommandLine:
    """Parse a command line; ValueError for an argument that is no KEY=VALUE."""
    for_hydra, asks, kind = _split_options(arguments)
    parser = get_args_parser()
    parser.exit_on_error = False  # which Hydra's function has no parameter for
    try:
        parsed, unknown = parser.parse_known_intermixed_args(for_hydra)
    except ArgumentError as error:
        raise ValueError(str(error).removeprefix("argument ")) from error
    if unknown:
        raise ValueError(
            f"{unknown[0]}: no such option; expected --dry, --list, --version, --help, --cfg or -m"
        )
    keys = {
        key
        for (group, _), schema in schemas().items()
        if group is None
        for key in list_keys(schema)
    }
    keys |= set(map(short_key, keys))
    spelled = {word: _as_list(word, keys, parsed.multirun) for word in parsed.overrides}
    for word in spelled.values():
        _check(word)
    asks = asks or ("help" if parsed.help else "")
    words = [spelled.get(word, word) for word in for_hydra]
    entry = parsed.config_name or "smoke"
    for_itself = {name for name, value in vars(parsed).items() if value} - {
        "overrides",
        "config_name",
        "config_dir",
    }
    plain = not for_itself and not any(word.lstrip("+~").startswith("hydra") for word in spelled)
    return CommandLine(
        words, list(spelled.values()), entry, parsed.multirun, plain, asks, kind, parsed.config_dir
    )


def _split_options(arguments: list[str]) -> tuple[list[str], str, str]:
    """Return the arguments for Hydra, the option that starts no run (dry, version, list), and the
    kind of --list."""
    if "--version" in arguments:
        return [], "version", ""
    if "--list" in arguments:
        index = arguments.index("--list")
        kind = arguments[index + 1] if index + 1 < len(arguments) else ""
        return arguments[:index] + arguments[index + 2 :], "list", kind
    others = [word for word in arguments if word != "--dry"]
    return others, "dry" if len(others) < len(arguments) else "", ""


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


# ------------------------------------------------------------------------------
# Choose the environment with the packages that settings need, and restart the program in it.
# ------------------------------------------------------------------------------


def ensure_environment(settings: object) -> None:
    """Restart the program if the settings need another environment, or compiled modules."""
    environment = needed_environment(settings)
    if environment is not None:
        start_in(environment)
    if isinstance(settings, Study):
        restart_as(settings.executor.compiled)


def needed_environment(settings: object) -> str | None:
    """Return the environment that settings need; None if this one has all packages."""
    if not isinstance(settings, Study):
        environment = entry_of(settings).environment
        environment = environment(settings) if callable(environment) else environment
        return environment if environment and not find_spec("torch") else None
    if lacks_package(settings):
        return ENVIRONMENT
    if settings.runs_engine:
        return None if find_spec("torch") else "engine"
    if settings.executor.kind == "dask":
        return None if find_spec("distributed") else "cluster"
    return None


def start_in(environment: str) -> None:
    """Restart by runall.sh in another environment; return if runall.sh did not start this
    program."""
    if os.environ.get("SPANLAB_ENVIRONMENT", environment) != environment:
        script = str(HOME / "runall.sh")
        os.execvpe(
            "bash",
            ["bash", script, *sys.argv[1:]],
            os.environ | {"SPANLAB_ENVIRONMENT": environment},
        )


# ------------------------------------------------------------------------------
# The command line program: compose an entry of conf/ with Hydra, run it, and report user errors
# in one sentence.
# ------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="smoke")
def _entry(config: DictConfig) -> None:
    with _in_one_sentence():
        settings = as_settings(config)
        if HydraConfig.get().mode == RunMode.RUN:  # jobs of -m run in processes that cannot restart
            ensure_environment(settings)
        _run_entry(settings)


def _run_entry(settings: Any) -> None:
    """Run the program of an entry; exit code 1 where it reports a failure."""
    started = entry_of(settings)
    try:
        passed = started.run(settings, _run_name(settings), HOME / _output(settings).root)
    except KeyboardInterrupt as interrupt:
        interrupt.args = interrupt.args or (_RESUMES if started.resumes else _STARTS_AGAIN,)
        raise
    if passed is False:
        sys.exit(1)


@entry("study", Study, resumes=True)
def _run_study(study: Study, run: str, root: Path) -> None:
    from spanlab.study.sweep import run_settings

    study.output.run, hydra_run = run, HydraConfig.get()
    run_settings(study, str(hydra_run.job.config_name), hydra_run.overrides.task)


def _output(settings: object) -> OutputSettings:
    """Return where a program writes; the default where its settings have no such section."""
    return getattr(settings, "output", None) or OutputSettings()


def _run_name(settings: object) -> str:
    """Return the name of the run folder: the chosen name, or the entry with its overrides.

    Other settings thus never replace this run. With `-m` a chosen name gets the overrides too, for
    all jobs share it.
    """
    output, hydra_run = _output(settings), HydraConfig.get()
    if output.run and hydra_run.mode != RunMode.MULTIRUN:
        return output.run
    name = output.run or str(hydra_run.job.config_name)
    return folder_name(
        ",".join(filter(None, (name, without_sections(hydra_run.job.override_dirname))))
    )


def main() -> None:
    """Run the console script; exit code 0, 1 after a user error, 130 after Ctrl-C, 143 after
    SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    use_ascii_fallback()
    # a log that cannot be written, such as wandb's on a full disk, is no error
    logging.raiseExceptions = False
    with _in_one_sentence():
        register()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
        line = read(sys.argv[1:])
        if line.searched:
            check_folder(line.searched)
        if line.asks:
            print(_answer(line))
            return
        if line.many:
            ensure_environment(_first_job(line))
        sys.argv[1:] = with_sections(full_words(line.entry, line.arguments, line.searched))
        if line.plain:
            with _as_run(line) as settings:
                if HydraConfig.get().mode != RunMode.MULTIRUN:  # which a file of the user may set
                    ensure_environment(settings)
                    _run_entry(settings)
                    return
        if any(word.partition("=")[0] in PATHS for word in line.overrides):
            # checks the words as they were typed
            _composed(line.entry, line.overrides, line.searched)
        try:
            with explained(line.entry, line.overrides, line.searched):
                _entry()
        except MissingConfigException as missing:  # a launcher that only another environment has
            if "submitit" in str(missing):
                start_in("cluster")
            raise


def _answer(line: CommandLine) -> str:
    """Return the text of an option that starts no run: --version, --list, --help or --dry."""
    if line.asks == "version":
        return version()
    if line.asks == "list" and line.kind == "arms" and "-cn" in line.arguments:
        return "\n".join(compose(line.entry, line.overrides, line.searched).arms)
    if line.asks == "list":
        load_plugins(_composed(line.entry, line.overrides, line.searched).get("plugins") or ())
        return listing(line.kind)
    if line.asks == "help":
        return usage(line.entry, _composed(line.entry, line.overrides, line.searched))
    if line.many:
        raise ValueError("--dry with -m: expected one study, or sweep=[KEY=A,B,C]")
    from spanlab.study.sweep import PointComposer, check_entry, describe_run

    with _as_run(line) as settings:
        output = _output(settings)
        output.run, root = _run_name(settings), HOME / output.root
        if not isinstance(settings, Study):
            return check_entry(settings, line.entry, output.run, root)
        return describe_run(
            settings, line.entry, root, PointComposer(line.entry, line.overrides, as_settings)
        )


@contextmanager
def _as_run(line: CommandLine) -> Iterator[Any]:
    """Yield the settings of one run, while Hydra is initialized and knows the run, as in
    `hydra.main`.

    `hydra.main` composes an entry twice: before the run it asks for the mode alone.
    """
    before = HydraConfig.instance().cfg
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose_run(line.entry, line.overrides, line.searched)
        HydraConfig.instance().set_config(config)
        try:
            with open_dict(config):
                del config["hydra"]
            schema_of(config)
            yield as_settings(config)
        finally:
            HydraConfig.instance().cfg = before


def _first_job(line: CommandLine) -> object:
    """Return the settings of the first job of -m, whose environment all jobs use."""
    parsed = OverridesParser.create().parse_overrides(line.overrides)
    first = [
        next(item.sweep_string_iterator()) if item.is_sweep_override() else None for item in parsed
    ]
    chosen = [
        word if value is None else f"{word.partition('=')[0]}={value}"
        for word, value in zip(line.overrides, first, strict=True)
    ]
    return compose(line.entry, chosen, line.searched)


_RESUMES = (
    "interrupted; what was finished is kept: the same command with output.if_exists=resume goes on"
)
_STARTS_AGAIN = "interrupted: the same command starts again"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which `timeout`, Slurm and container hosts send before they kill a process."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Exit with one line after a user error; SPANLAB_TRACEBACK=1 raises it instead."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        code = 128 + (signal.SIGTERM if isinstance(interrupt, _Terminated) else signal.SIGINT)
        _exit(with_notes(str(interrupt) or "interrupted", interrupt), code)
    except Exception as mistake:  # all but user errors are raised again
        if os.environ.get("SPANLAB_TRACEBACK") or not is_user_error(mistake):
            raise
        _exit(with_short_keys(sentence(mistake)), 1)


def _exit(message: str, code: int) -> NoReturn:
    print(f"spanlab: {message}", file=sys.stderr)
    sys.exit(code)


def compose(entry: str, overrides: list[str], searched: str | None = None) -> Any:
    """Compose the settings of an entry as the command line does; `searched` is Hydra's
    --config-dir."""
    return as_settings(_composed(entry, overrides, searched))


def _composed(entry: str, overrides: list[str], searched: str | None = None) -> DictConfig:
    register()
    keys = [word for word in overrides if not word.lstrip("+~").startswith("hydra")]
    if searched:
        check_folder(searched)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose_entry(entry, keys, searched)
    schema_of(config)
    return config
