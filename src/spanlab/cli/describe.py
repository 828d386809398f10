"""Text of --list and --help: entries, groups, registered names, and the keys of an entry with their meanings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from spanlab.checks import one_of
from spanlab.compiled import CONF
from spanlab.registry import Registry

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
    """Return the meaning of each key from the docstrings of a schema and its bases; the schema takes precedence."""
    meanings: dict[str, str] = {}
    for base in schema.__mro__[:-1]:
        names: list[str] = []
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            if entry := MEANING.match(line):
                names = [name for name in re.findall(r"`([\w*]+)`", entry[1]) if name not in meanings]
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
    """Return the names of all entries: the files of conf/."""
    return sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "config")


def groups() -> list[str]:
    """Return the names of all config groups: the folders of conf/."""
    return sorted(path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra")


def listing(kind: str) -> str:
    """Return one line per entry, choice of a group, or name that a key takes; the plural of a group is accepted."""
    kind = next((group for group in groups() if kind in (f"{group}s", f"{group[:-1]}ies")), kind)
    if kind == "entries":
        return _lines(_entries())
    if kind in groups():
        return _lines(_choices(CONF / kind))
    names = registries()
    one_of("--list", kind, ("entries", *names, *groups()))
    return _lines(registered(names[kind]))


def registries() -> dict[str, Registry[Any]]:
    """Return what a plugin can extend: the registries by the key that takes their names; figures have no key."""
    # here, because most commands need none of these modules
    from spanlab.core.admission import ADMISSIONS
    from spanlab.core.cost import COSTS
    from spanlab.core.eviction import EVICTION_ORDERS
    from spanlab.core.placement import PLACEMENTS
    from spanlab.core.policies.named import POLICIES
    from spanlab.core.recovery import RECOVERIES
    from spanlab.report.figures import FIGURES
    from spanlab.settings.analyses import ANALYSES
    from spanlab.settings.plan import SEARCHES
    from spanlab.workloads.logs.formats import LOG_FORMATS
    from spanlab.workloads.source import WORKLOADS
    from spanlab.workloads.writers.formats import WRITERS
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
        "workload.log.format": LOG_FORMATS,
        "arrivals.kind": ARRIVALS,
        "replicas.routing": ROUTERS,
        "timing.kind": TIMINGS,
        "analyses": ANALYSES,
        "plan.search": SEARCHES,
        "writer.format": WRITERS,
    }


def registered(registry: Registry[Any]) -> dict[str, str]:
    """Return the names of a registry, also those of loaded plugins, with the first line of their docstrings."""
    return {name: (inspect.getdoc(registry[name]) or "").partition("\n")[0] for name in registry}


def usage(entry: str, config: Any) -> str:
    """Return the text of --help; `config` is the composed entry."""
    schema = config._metadata.object_type
    return _USAGE.format(
        kinds="the entries, the choices of a group, or the names that a KEY takes, with those of plugins",
        entries=_lines(_entries()),
        groups="\n".join(f"{name}: {', '.join(_choices(CONF / name))}" for name in groups()),
        entry=entry,
        keys=_lines(dict(_keys(schema, config))),
    )


def list_keys(schema: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a schema that hold lists; `*` stands for the name of an arm."""
    for name, hint in get_type_hints(schema).items():
        if get_origin(hint) is list:
            yield prefix + name
        elif (schema_below := dataclass_in(hint)) is not None:
            yield from list_keys(schema_below, f"{prefix}{name}.{'*.' if get_origin(hint) is dict else ''}")


def _entries() -> dict[str, str]:
    return {name: first_sentence(CONF / f"{name}.yaml") for name in entries()}


def _choices(folder: Path) -> dict[str, str]:
    return {path.stem: first_sentence(path) for path in sorted(folder.glob("*.yaml"))}


def _keys(schema: type[Any], config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield KEY=VALUE and the meaning of each key; for arms, the names of the arms."""
    hints, meanings = get_type_hints(schema), meanings_of(schema)
    for name in (field.name for field in fields(schema)):
        value = None if config is None else config._get_node(name)
        meaning, below = meaning_of(meanings, name), dataclass_in(hints[name])
        if get_origin(hints[name]) is dict:
            yield f"{prefix}{name}", f"{meaning}: {', '.join(() if value is None else value)}"
        elif below is not None and value is not None and not value._is_none():
            yield from _keys(below, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={'null' if value is None else value}", meaning


def _lines(rows: dict[str, str]) -> str:
    width = min(44, max(map(len, rows), default=0))
    return "\n".join(f"  {name:{width}}  {text}".rstrip() for name, text in rows.items())
