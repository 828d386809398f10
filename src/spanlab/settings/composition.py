"""Composition of entries with Hydra: sections that are null are created, values keep their types,
errors are sentences.

OmegaConf converts numbers to true or false, accepts any number, and raises errors of Python on some
overrides. This module checks what it composes, so that the settings' own checks see the types that
they declare.
"""

from __future__ import annotations

import copy
import copyreg
import math
import pickle
import re
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, asdict, field, fields, is_dataclass, make_dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, NamedTuple, cast, get_args, get_origin, get_type_hints

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ValidationError
from omegaconf.nodes import BooleanNode

from spanlab.compiled import CONF, HOME
from spanlab.core.admission import BatchRules
from spanlab.core.placement.rules import PLACEMENTS
from spanlab.core.tiers import TierRules
from spanlab.errors import CHOICES, USER_ERRORS, sentence
from spanlab.kinds import kinds_of
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.registry import ENTRIES, among, load_plugins, one_of, refuse_unknown_keys, summary_of
from spanlab.settings.analyses import (
    ANALYSES,
    EARLIER,
    PATHS,
    SHORT_NAMES,
    Analyses,
    full_key,
    short_key,
)
from spanlab.settings.arms import Strategy
from spanlab.settings.server import (
    EXECUTORS,
    TRACKERS,
    ExecutorSettings,
    ServerSettings,
    StoreSettings,
    TrackingSettings,
)
from spanlab.settings.study import ModelSource, register_models
from spanlab.workloads.load import WorkloadSettings
from spanlab_sim.arrivals import Arrivals
from spanlab_sim.timings import Timing

_LIBRARIES = ("hydra", "omegaconf", "antlr4", "yaml")
_GROUP = re.compile(r"Could not override '([^']+)'")
_CREATED = re.compile(r"(^|,)[^,={}]+=(\{\w+:)+\{\}\}+(?=,|$)")  # an override by `with_sections`
_LEAST, _MOST, _WHOLE = 1e-15, 1e18, 1 << 63
# resolving the annotations of a schema takes milliseconds
_KNOWN_HINTS: dict[Any, dict[str, Any]] = {}
_DEPTHS = ("*", "*/*", "*/*/*")  # of files below a folder with entries
_NODES = 100_000  # of one YAML file, aliases expanded


def compose_entry(entry: str, overrides: Sequence[str], searched: str | None = None) -> DictConfig:
    """Compose an entry where Hydra is initialized; ValueError with one sentence for what Hydra
    cannot compose.

    `searched`  a folder of further choices (--config-dir)
    """
    config = compose_run(entry, overrides, searched)
    with open_dict(config):
        config.pop("hydra", None)
    return config


def compose_run(entry: str, overrides: Sequence[str], searched: str | None = None) -> DictConfig:
    """Compose an entry as `compose_entry`, with the section `hydra` that a run of the command line
    has."""
    with explained(entry, overrides, searched):
        return _compose(entry, overrides, searched)


def _compose(entry: str, overrides: Sequence[str], searched: str | None) -> DictConfig:
    # as Hydra's own --config-dir; its override hydra.searchpath finds groups, but no entry
    loader: Any = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    if searched:
        # which stays last
        path.prepend("command-line", f"file://{Path(searched).absolute()}", anchor="schema")
    loader.repository = _Repository(path)
    # Files are read once for the same choices, and values are set in a copy: a sweep, a notebook
    # and a page compose one entry many times, and Hydra takes 0.2 to 0.7 seconds for it.
    words = with_sections(full_words(entry, overrides, searched))
    config = _with_values(entry, words)
    if config is None:
        config = hydra.compose(entry, list(words), return_hydra_config=True)
    check_paths(overrides, config)
    return config


class _Repository(ConfigRepository):
    """Hydra's repository of sources, which reads a file once while it does not change.

    Hydra parses and converts each file in each composition, and copies the repository with every
    schema of its store. The store is filled once per process.
    """

    def __deepcopy__(self, _: dict[int, Any]) -> _Repository:
        return copy.copy(self)  # a copy is given other sources, and changes none

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Return a file, a schema of the store or a model, with its defaults list."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() == ModelSource.scheme():
            return super().load_config(config_path)
        key: tuple[Hashable, ...] = (source.provider, source.full_path(), config_path)
        if source.scheme() == "file":
            stat = (Path(source.path) / f"{config_path.removesuffix('.yaml')}.yaml").stat()
            key += (stat.st_mtime_ns, stat.st_size)
        if key not in _LOADED:
            _LOADED[key] = pickle.dumps(super().load_config(config_path))
        return cast(ConfigResult, pickle.loads(_LOADED[key]))


# pickled, which is copied faster than a config
_LOADED: dict[Hashable, bytes] = {}
_COMPOSED: dict[Hashable, bytes] = {}


def _with_values(entry: str, words: Sequence[str]) -> DictConfig | None:
    """Return an entry whose values Hydra's last step sets in a copy of its choices; None where
    Hydra has to compose the whole."""
    values: list[Override] = []
    choices: list[str] = []
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
        for override in parsed:
            # such as its search path, which decides what the choices are
            if override.is_sweep_override() or override.key_or_group.startswith("hydra."):
                return None
            if isinstance(override.value(), dict) or not _is_group(override.key_or_group):
                values.append(override)
            else:
                choices.append(str(override.input_line))
        config = _with_choices(entry, choices)
    except Exception:  # of any type: the whole composition says what is wrong
        return None
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    unnamed = config.hydra.job.config.override_dirname.exclude_keys
    named = sorted(
        str(override.input_line) for override in parsed if override.key_or_group not in unnamed
    )
    with read_write(config.hydra):
        config.hydra.overrides.task = list(words)
        config.hydra.job.override_dirname = ",".join(named)
    return config


def _with_choices(entry: str, choices: Sequence[str]) -> DictConfig:
    files = _files()
    if (entry, *choices, files) not in _COMPOSED:
        made = hydra.compose(entry, list(choices), return_hydra_config=True)
        # an entry may add a folder to the search path, and is composed anew each time
        files = _files()
        _COMPOSED[entry, *choices, files] = pickle.dumps(made)
    return cast(DictConfig, pickle.loads(_COMPOSED[entry, *choices, files]))


def _is_group(key: str) -> bool:
    """Return whether a key is a group of choices; Hydra's own answer copies its whole store."""
    stored: Any = ConfigStore.instance().repo
    for name in key.split("/"):
        stored = stored.get(name) if isinstance(stored, dict) else None
    return isinstance(stored, dict) or any((folder / key).is_dir() for folder in _folders())


def _folders() -> list[Path]:
    sources = GlobalHydra.instance().config_loader().get_sources()
    return [Path(source.path) for source in sources if source.scheme() == "file"]


def _files() -> tuple[tuple[str, int, int], ...]:
    """Return every file that a composition may read, with its time of change and its size."""
    files = (
        file for folder in _folders() for depth in _DEPTHS for file in folder.glob(f"{depth}.yaml")
    )
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


def composed(entry: str, overrides: Sequence[str]) -> object:
    """Return the settings of an entry that another one uses, whether or not Hydra runs that one."""
    is_ready = GlobalHydra.instance().is_initialized()
    with (
        nullcontext()
        if is_ready
        else hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF))
    ):
        return as_settings(compose_entry(entry, overrides))


def as_settings(config: DictConfig) -> object:
    """Convert a composed config to checked settings; no other code reads a DictConfig."""
    schema = schema_of(config)
    load_plugins(OmegaConf.select(config, "plugins") or ())
    _check_section("", OmegaConf.to_container(config, resolve=True), schema)
    section = next((name for name, hint in hints_of(schema).items() if _is_analyses(hint)), None)
    if section is not None:
        # the options of each analysis, also of a plugin's, get their types
        typed = {key.name: hint for key, hint in _options(hints_of(schema)[section])}
        given = OmegaConf.select(config, section)
        for name in given:
            if name != "names":
                one_of(section, str(name), typed)
        with open_dict(config):
            for name, hint in typed.items():
                if name not in given or OmegaConf.get_type(given, name) is not hint:
                    given[name] = OmegaConf.merge(OmegaConf.structured(hint), given.get(name) or {})
    settings: Any = OmegaConf.to_object(config)
    refuse_unknown_keys(settings)
    if type(settings) is schema:  # else it is an object of the class that `open_schema` made of it
        return settings
    values = {key.name: getattr(settings, key.name) for key in fields(settings)}
    for name, hint in hints_of(schema).items():
        if (kinds := kinds_of(hint)) is not None:
            values[name] = kinds.of(name, values[name])
        elif _is_analyses(hint):
            values[name] = hint(**values[name])
    return schema(**values)


def open_schema(schema: Any) -> Any:
    """Return what Hydra composes for a schema: sections that have kinds take any key until the kind
    is known.

    An entry may thus set keys for its own kind, a command may choose another kind and set those
    keys to null, and `kind` may be set like any other key. `Kinds.of` checks what came of it.
    """
    if kinds_of(schema) is not None:
        return _open_section({})
    if schema in _OPENED:
        return _OPENED[schema]
    hints = hints_of(schema)
    opened: dict[str, Any] = {}
    for key in fields(schema):
        if kinds_of(hints[key.name]) is not None:
            default = {} if key.default_factory is MISSING else asdict(key.default_factory())
            opened[key.name] = partial(_open_section, default)
        elif _is_analyses(hints[key.name]):
            opened[key.name] = partial(_open_analyses, hints[key.name])
    short = _short_names(hints)
    if not opened and not short:
        return schema
    keys = [
        (key.name, Any, field(default_factory=opened[key.name]))
        if key.name in opened
        else (
            key.name,
            hints[key.name],
            field(default=key.default, default_factory=key.default_factory),
        )
        for key in fields(schema)
    ]
    names = {"opens": schema, "short_names": short}
    _OPENED[schema] = make_dataclass(
        schema.__name__, keys, bases=(_Opened(schema.__name__, (), names),)
    )
    return _OPENED[schema]


def _short_names(hints: dict[str, Any]) -> dict[str, str]:
    """Return full keys by short name: all for a study, those of a server for another schema with
    that section."""
    is_study, names = any(map(_is_analyses, hints.values())), SHORT_NAMES | EARLIER
    sections = {full.partition(".")[0] for full in names.values()} if is_study else set()
    sections |= {name for name, hint in hints.items() if hint is ServerSettings}
    return {
        name: full
        for name, full in sorted(names.items())
        if name not in hints and full.partition(".")[0] in sections
    }


class _Opened(type):
    """Type of the classes that `open_schema` makes: pickled by the schema, for launchers of -m send
    configs."""


copyreg.pickle(_Opened, lambda opened: (open_schema, (opened.opens,)))  # type: ignore[attr-defined]
_OPENED: dict[Any, Any] = {}


def _opened_by(config: Any) -> type[Any] | None:
    """Return the schema of a composed entry, or None."""
    composed: Any = OmegaConf.get_type(config)
    schema: type[Any] | None = getattr(composed, "opens", composed)
    return schema


def _open_section(values: dict[str, Any]) -> DictConfig:
    return OmegaConf.create(values, flags={"struct": False})


def _is_analyses(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Analyses)


def _open_analyses(schema: type[Analyses]) -> DictConfig:
    """Return a section with the options of the analyses, which takes those of plugins too."""
    typed = {key.name: OmegaConf.structured(hint) for key, hint in _options(schema)}
    return OmegaConf.create({"names": None, **typed}, flags={"struct": False})


def _options(schema: type[Analyses]) -> list[tuple[Any, Any]]:
    return [(key, hints_of(schema)[key.name]) for key in fields(schema) if key.name != "names"]  # type: ignore[arg-type]


def schema_of(config: DictConfig) -> type[Any]:
    """Return the schema of a composed entry; ValueError if its defaults list has none."""
    schema = _opened_by(config)
    if schema is None or not is_dataclass(schema):
        names = ", ".join(name for group, name in schemas() if group is None)
        raise ValueError(
            f"defaults: expected in the entry's list an entry to extend, such as smoke, or one of {names}"
        )
    return schema


def check_folder(searched: str) -> None:
    """Raise ValueError for a --config-dir that is no folder, or with YAML whose aliases expand
    without bound."""
    folder = Path(searched)
    if not folder.is_dir():
        raise ValueError(
            f"--config-dir={searched}: expected a folder with entries, or with groups of choices"
        )
    for file in (
        path for depth in _DEPTHS for path in folder.glob(f"{depth}.yaml") if path.is_file()
    ):
        text = file.read_bytes()
        if b"&" not in text or b"*" not in text:
            continue
        try:
            size = _expanded(yaml.compose(text, Loader=yaml.SafeLoader), {})
        except yaml.YAMLError:
            continue  # Hydra names the line, if it reads the file
        if size > _NODES:
            raise ValueError(
                f"{file}: aliases expand to more than {_NODES} values; expected each written out"
            )


def _expanded(node: Any, known: dict[int, float]) -> float:
    """Return the number of values below a YAML node with its aliases expanded; infinite for one
    inside itself."""
    if isinstance(node, (yaml.MappingNode, yaml.SequenceNode)) and id(node) not in known:
        known[id(node)] = math.inf
        items = [
            below for item in node.value for below in (item if isinstance(item, tuple) else (item,))
        ]
        known[id(node)] = 1 + sum(_expanded(item, known) for item in items)
    return known.get(id(node), 1)


_SIGN = re.compile(r"([+~]*)([^=+~]*)(.*)", re.DOTALL)


def full_words(entry: str, words: Sequence[str], searched: str | None = None) -> list[str]:
    """Return overrides of an entry, or other words, with short names of a study's keys written
    out."""
    schema = _schema_of_entry(entry, searched)
    if schema is None or any(map(_is_analyses, hints_of(schema).values())):
        return [_full_word(word) for word in words]
    short = getattr(open_schema(schema), "short_names", {})
    return [
        _full_word(word) if re.split(r"[.=]", word.lstrip("+~"))[0] in short else word
        for word in words
    ]


def _full_word(word: str) -> str:
    sign, key, value = cast(re.Match[str], _SIGN.match(word)).groups()
    sets_options = key == "analyses" and value.lstrip("= ").startswith("{")
    return (
        word
        if sets_options or not (value.startswith("=") or "~" in sign)
        else f"{sign}{full_key(key)}{value}"
    )


def short_words(overrides: str) -> str:
    """Return overrides joined by commas with the short names of keys."""
    return re.sub(
        r"(^|,)([+~]*)([\w.]+)(?==)", lambda word: word[1] + word[2] + short_key(word[3]), overrides
    )


def check_paths(overrides: Sequence[str], config: DictConfig) -> None:
    """Raise ValueError for `log=` or `local=` in an entry whose workload does not read such a
    file."""
    kind = OmegaConf.select(config, "workload.kind", default=None)
    for word in overrides:
        key, _, value = word.partition("=")
        if (
            (expected := PATHS.get(key)) is not None
            and value != "null"
            and kind not in (None, expected)
        ):
            entry = (
                "-cn explain log=FILE, or plan" if key == "log" else "-cn pic_answers local=FILE"
            )
            raise ValueError(f"{word} with workload.kind={kind}: expected {entry}")
        if key in PATHS and (
            twice := [
                other for other in overrides if other.lstrip("+").startswith("workload.path=")
            ]
        ):
            raise ValueError(f"{word} with {twice[0]}: expected one of both")


def with_sections(overrides: Sequence[str]) -> list[str]:
    """Return overrides that first create the optional sections, with their defaults, below which
    they set keys.

    OmegaConf cannot set a key of a section that is null. `arms.a.pool.block_size=32` thus follows
    `arms.a={pool:{}}`, which changes no section that exists.
    """
    made: dict[str, None] = {}
    result: list[str] = []
    for word in overrides:
        key, equals, value = word.partition("=")
        names = key.lstrip("+").split(".")
        depth = len(names) - (not value.lstrip().startswith("{"))
        optional = [
            at for at in range(1, depth + 1) if equals and _is_optional(".".join(names[:at]))
        ]
        if optional and not word.startswith("~"):
            first, last = optional[0] - 1, optional[-1]
            inner = "".join(f"{name}:{{" for name in names[first:last])
            created = f"{'.'.join(names[:first])}={{{inner}{'}' * (last - first)}}}"
            if created not in made:
                made[created] = None
                result.append(created)
        result.append(word)
    return result


def without_sections(overrides: str) -> str:
    """Return overrides joined by commas without those that `with_sections` added: they name no
    choice of the user."""
    return short_words(_CREATED.sub("", overrides).lstrip(","))


def _is_optional(key: str) -> bool:
    return any(
        fnmatchcase(key, pattern) and key.count(".") == pattern.count(".")
        for pattern in optional_sections()
    )


@cache
def optional_sections() -> tuple[str, ...]:
    """Return the dotted keys of sections that may be null; `*` stands for a name, as of an arm."""
    return tuple(
        dict.fromkeys(
            key
            for (group, _), schema in schemas().items()
            if group is None
            for key in _optional(schema)
        )
    )


def _optional(schema: type[Any], prefix: str = "") -> Iterator[str]:
    for name, hint in hints_of(schema).items():
        key = f"{prefix}{name}{'.*' if get_origin(hint) is dict else ''}"
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and is_dataclass(kind):
                if NoneType in get_args(hint):
                    yield key
                yield from _optional(kind, f"{key}.")


@contextmanager
def explained(entry: str, overrides: Sequence[str], searched: str | None = None) -> Iterator[None]:
    """Raise ValueError with one sentence for an error that Hydra or OmegaConf raise in the block.

    Errors of this program's code pass unchanged. The cause of the ValueError is the original error.
    """
    try:
        yield
    except MissingConfigException:
        raise
    except (ConfigAttributeError, ConfigKeyError) as error:
        key = str(getattr(error, "full_key", None) or getattr(error, "key", "")).partition(".")[0]
        raise ValueError(f"{sentence(error)}{_elsewhere(entry, key)}") from error
    except HydraException as error:
        group = _GROUP.match(str(error))
        unknown = isinstance(error.__cause__, (ConfigAttributeError, ConfigKeyError))
        if "Cannot merge DictConfig with ListConfig" in str(error):
            expected = "expected KEY: {...}, as in analyses: {names: [summary]}"
            raise ValueError(f"entry {entry}: a list where a section stands; {expected}") from error
        if unknown:
            key = str(getattr(error.__cause__, "full_key", None) or "").partition(".")[0]
            raise ValueError(f"{sentence(error)}{_elsewhere(entry, key)}") from error
        if group is None:
            raise
        raise ValueError(_no_group(entry, group[1])) from error
    except USER_ERRORS:
        raise
    except Exception as error:  # of any type, if a library raised it; all others are raised again
        if not _raised_by_library(error.__traceback__):
            raise
        word = _faulty(entry, overrides, searched, type(error))
        expected = (
            "nesting of fewer levels"
            if isinstance(error, RecursionError)
            else "a value of the key's type"
        )
        what = f"{_short(word)}: " if word else ""
        raise ValueError(
            f"{what}Hydra cannot compose it ({type(error).__name__}); expected {expected}"
        ) from error


def _raised_by_library(trace: TracebackType | None) -> bool:
    """Return whether Hydra or OmegaConf is behind the last call of this program in a traceback."""
    below = False
    while trace is not None:
        package = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]
        below = package in _LIBRARIES or (below and not package.startswith("spanlab"))
        trace = trace.tb_next
    return below


def _faulty(
    entry: str, overrides: Sequence[str], searched: str | None, kind: type[Exception]
) -> str:
    """Return the first override with which the composition raises `kind`; empty if it does so
    without any."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        for count in range(len(overrides) + 1):
            try:
                _compose(entry, overrides[:count], searched)
            except kind:
                return overrides[count - 1] if count else ""
            except Exception:  # another mistake, which is not the one to name
                continue
    return ""


def _no_group(entry: str, group: str) -> str:
    """Return the sentence about a group that the entry has no choice of."""
    schema = _schema_of_entry(entry)
    keys = (
        []
        if schema is None
        else [*hints_of(schema), *getattr(open_schema(schema), "short_names", ())]
    )
    if group in keys:
        having = _some([name for name in _other_entries(entry) if group in dict(_defaults(name))])
        written = f"{group}: entry {entry} has no such group, its keys are in the entry"
        return f"{written}; expected {group}.KEY=VALUE; entries with the group {group}: {having}"
    same = [
        key
        for key in ([] if schema is None else _leaves(schema))
        if key.rpartition(".")[2] == group
    ]
    hint = f"one of {', '.join(keys)} (did you mean {same[0]}?)" if same else among(group, keys)
    return f"{group}: entry {entry} has no such group; expected {hint}{_elsewhere(entry, group)}"


def _elsewhere(entry: str, key: str) -> str:
    """Return which entries have a top-level key or a group that this entry lacks; empty for
    none."""
    having = [name for name in _other_entries(entry) if key in _keys_of_entry(name)]
    return (
        f"; entries with {key}: {_some(having)}"
        if having and key not in _keys_of_entry(entry)
        else ""
    )


def _other_entries(entry: str) -> list[str]:
    files = (path.stem for path in CONF.glob("*.yaml") if path.stem != "config")
    return sorted(
        {*files, *(name for group, name in choices_without_file() if group is None)} - {entry}
    )


def _some(names: list[str]) -> str:
    shown = names if len(names) < 4 else names[:3]
    return ", ".join(shown) + (
        f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    )


def _keys_of_entry(name: str) -> set[str]:
    schema = _schema_of_entry(name)
    short = getattr(open_schema(schema), "short_names", ()) if schema else ()
    return (
        ({*hints_of(schema)} if schema else set())
        | {*short}
        | {group for group, _ in _defaults(name) if group}
    )


def _schema_of_entry(name: str, searched: str | None = None) -> type[Any] | None:
    for group, choice in _defaults(name, searched):
        node = ConfigStore.instance().repo.get(f"{choice}.yaml") if not group else None
        if node is not None:
            return _opened_by(node.node)
    return None


@cache
def _defaults(name: str, searched: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return (group, choice) of an entry and of the entries that it extends; an empty group: a
    file."""
    files = [Path(folder) / f"{name}.yaml" for folder in (searched, CONF) if folder is not None]
    file = next((path for path in files if path.is_file()), None)
    try:
        stored = choices_without_file().get((None, name))
        content = yaml.safe_load(file.read_bytes()) if file else stored.content if stored else {}
        listed = content.get("defaults", [])
    except (yaml.YAMLError, AttributeError):
        return ()  # Hydra says what is wrong with the file
    chosen: list[tuple[str, str]] = []
    for item in listed:
        for group, choice in item.items() if isinstance(item, dict) else [("", str(item))]:
            chosen.append(
                (group.removeprefix("override ").lstrip("/").partition("@")[0], str(choice))
            )
            if not group:
                chosen += _defaults(str(choice), searched)
    return tuple(chosen)


def hints_of(schema: Any) -> dict[str, Any]:
    """Return the types of the keys of a schema, and of the options of every registered analysis."""
    if (kinds := kinds_of(schema)) is not None:
        all_hints: dict[str, Any] = kinds.all_hints()
        return all_hints
    if schema not in _KNOWN_HINTS:
        hints = get_type_hints(schema)
        _KNOWN_HINTS[schema] = {field.name: hints[field.name] for field in fields(schema)}
    return {
        name: ANALYSES.section() if hint is Analyses else hint
        for name, hint in _KNOWN_HINTS[schema].items()
    }


def _leaves(schema: type[Any], prefix: str = "") -> Iterator[str]:
    for name, hint in hints_of(schema).items():
        yield f"{prefix}{name}"
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and is_dataclass(kind) and get_origin(hint) is not dict:
                yield from _leaves(kind, f"{prefix}{name}.")


def _check_section(path: str, value: object, schema: Any) -> None:
    """Raise ValueError for a value below a section that does not have the type of its key."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{short_key(path)}={_short(value)}: expected its keys, {', '.join(hints_of(schema))}"
        )
    hints = hints_of(schema)
    for name, item in value.items():
        if name in hints:
            _check(f"{path}.{name}" if path else str(name), item, hints[name])


def _check(path: str, value: object, hint: Any) -> None:
    """Raise ValueError for a value that is not of the declared type, or for a number out of
    range."""
    kinds = (
        [kind for kind in get_args(hint) if kind is not NoneType]
        if NoneType in get_args(hint)
        else [hint]
    )
    if value == "???" or (value is None and (NoneType in get_args(hint) or hint is Any)):
        return
    kind = get_origin(kinds[0]) or kinds[0]
    if kinds_of(kind) is not None and isinstance(value, dict):
        _check_items(path, value, dict, (Any, Any))  # `Kinds.of` checks the types
    elif is_dataclass(kind):
        _check_section(path, value, kind)
    elif kind is list or kind is dict:
        _check_items(path, value, kind, get_args(kinds[0]))
    elif kind is Any and isinstance(value, (list, dict)):
        _check_items(path, value, type(value), (Any, Any))
    else:
        name = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(
            kind
        )
        if name and not (type(value) is kind or (kind is float and type(value) is int)):
            raise ValueError(f"{short_key(path)}={_short(value)}: expected {name}")
        if type(value) is int and not -_WHOLE <= value < _WHOLE:
            raise ValueError(
                f"{short_key(path)}={_short(value)}: expected a whole number of 64 bits, from -2^63 to 2^63 - 1"
            )
        if type(value) is float and not math.isfinite(value):
            raise ValueError(f"{short_key(path)}={value}: expected a finite number")
        if type(value) is float and value and not _LEAST <= abs(value) <= _MOST:
            raise ValueError(
                f"{short_key(path)}={value}: expected zero, or a number from {_LEAST:g} to {_MOST:g}"
            )


def _check_items(path: str, value: object, kind: type[Any], kinds: tuple[Any, ...]) -> None:
    if not isinstance(value, kind):
        raise ValueError(
            f"{short_key(path)}={_short(value)}: expected {'a list' if kind is list else 'names with values'}"
        )
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        _check(
            f"{path}.{name}" if isinstance(value, dict) else f"{short_key(path)}[{name}]",
            item,
            kinds[-1],
        )


def _short(value: object) -> str:
    text = (
        str(value)
        if not isinstance(value, int) or abs(value) < 1 << 128
        else f"a number of {value.bit_length()} bits"
    )
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def keep_booleans() -> None:
    """Let OmegaConf refuse numbers for true and false in every source of settings; safe to call
    again."""
    BooleanNode._validate_and_convert_impl = _boolean  # type: ignore[method-assign, assignment]


_convert = BooleanNode._validate_and_convert_impl


def _boolean(node: BooleanNode, value: Any) -> bool:
    if isinstance(value, (bool, str)) and not str(value).lstrip("+-").isdecimal():
        return _convert(node, value)
    raise ValidationError(
        "Value '$VALUE' is not a valid bool (type $VALUE_TYPE); expected true or false"
    )


# ------------------------------------------------------------------------------
# Schemas of entries and of config groups, and the choices that need no file of conf/.
# ------------------------------------------------------------------------------

_GROUPS: dict[tuple[str | None, str], type[Any]] = {
    ("model", "base_model"): ModelSpec,
    ("hardware", "base_hardware"): HardwareSpec,
    ("workload", "base_workload"): WorkloadSettings,
    ("arrivals", "base_arrivals"): Arrivals,
    ("timing", "base_timing"): Timing,
    ("batch", "base_batch"): BatchRules,
    ("store", "base_store"): StoreSettings,
    ("strategy", "base_strategy"): Strategy,
    ("tier", "base_tier"): TierRules,
    ("tracking", "base_tracking"): TrackingSettings,
    ("executor", "base_executor"): ExecutorSettings,
}


def schemas() -> dict[tuple[str | None, str], type[Any]]:
    """Return every schema by (config group, name), for the ConfigStore: those of entries, and those
    of groups."""
    return {(None, f"base_{name}"): entry.schema for name, entry in ENTRIES.items()} | _GROUPS


class Choice(NamedTuple):
    """A choice that no file of conf/ describes.

    `content`  what it sets, as a file would
    `meaning`  the first line of the docstring of what it chooses
    """

    content: dict[str, Any]
    meaning: str


_MEMORY = "KV and states together, running requests included."
#: Choices that set one key at most.
_STATED: dict[tuple[str | None, str], Choice] = {
    ("store", "gib_2"): Choice({"total_gib": 2}, _MEMORY),
    ("store", "gib_16"): Choice({"total_gib": 16}, _MEMORY),
    ("store", "gib_64"): Choice({"total_gib": 64}, _MEMORY),
    ("store", "unlimited"): Choice({}, "No limit."),
    ("strategy", "kv_only"): Choice(
        {"family": "kv_only"},
        "Stores KV and no state: on a hybrid model it matches prompts and reuses nothing.",
    ),
    ("tier", "own"): Choice(
        {}, "Your own tier: store.tiers.NAME.gib=SIZE store.tiers.NAME.bandwidth_gb_s=RATE."
    ),
    ("workload", "plugin"): Choice(
        {"kind": "???"},
        "A workload from a plugin: plugins=[FILE] workload.kind=NAME workload.KEY=VALUE.",
    ),
}


def choices_without_file() -> dict[tuple[str | None, str], Choice]:
    """Return the choices that have no file, by (group, name); entries have the group None.

    An entry without further settings, a kind with its own defaults, a size, and a strategy that
    sets its placement alone: a file would repeat the name.
    """
    made: dict[tuple[str | None, str], Choice] = {}
    for name in ENTRIES.keys() - {"study"}:  # which config.yaml completes
        content = {"defaults": [f"base_{name}", {"hydra": "default"}, "_self_"]}
        made[None, name] = Choice(content, summary_of(ENTRIES[name].schema))
    for (group, _), schema in _GROUPS.items():
        kinds: Any = kinds_of(schema) or {}
        for name in kinds:
            examples = {
                key.name: example
                for key in fields(kinds[name])
                if (example := key.metadata.get("example")) is not None
            }
            made[group, name] = Choice({"kind": name} | examples, summary_of(kinds[name]))
    for group, texts in {"executor": EXECUTORS, "tracking": TRACKERS}.items():
        made |= {(group, name): Choice({"kind": name}, text) for name, text in texts.items()}
    made |= _STATED
    for name in PLACEMENTS:
        if not PLACEMENTS.needs_options(name):
            text = summary_of(PLACEMENTS[name]).removeprefix(f"`{name}`: ")
            made["strategy", name] = Choice(
                {"placement": {"kind": name}}, text[0].upper() + text[1:]
            )
    return {
        at: choice
        for at, choice in made.items()
        if not (CONF / (at[0] or "") / f"{at[1]}.yaml").is_file()
    }


def register() -> None:
    """Register schemas, models and the resolver with Hydra; safe to call again."""
    OmegaConf.register_new_resolver("spanlab_root", lambda: str(HOME), replace=True)
    keep_booleans()
    register_models()
    _register_schemas()


@cache
def _register_schemas() -> None:
    """Register the schemas once per process, for converting all of them to config nodes is slow."""
    store = ConfigStore.instance()
    for (group, name), schema in schemas().items():
        store.store(name=name, node=open_schema(schema), group=group)
    for (group, name), choice in choices_without_file().items():
        store.store(name=name, node=choice.content, group=group, provider=CHOICES)
