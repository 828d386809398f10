"""Print docs/configuration.md: all keys of the schemas, registered names, and all files of conf/.

    .venvs/sim/bin/python docs/generate.py > docs/configuration.md

Keys, types and defaults are those of the dataclasses in `spanlab.settings`. Meanings and choices
are those that a field declares (`spanlab.kinds.field`). For other fields meanings come from the
docstring and choices from the calls of `one_of` in the class; a key without a meaning is an error.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml

from spanlab.cli import (
    dataclass_in,
    described,
    meaning_of,
    meanings_of,
    options_of,
    registered,
    registries,
)
from spanlab.kinds import Kinds, kinds_of
from spanlab.registry import ENTRIES, REQUIRED, Registry, bounds_of
from spanlab.settings import Study
from spanlab.settings.analyses import PATHS, SHORT_NAMES
from spanlab.settings.composition import choices_without_file, hints_of

CONF = Path(__file__).resolve().parents[1] / "conf"
MAX_VALUES = 11  # a choice with more values is shown without them

HEAD = """\
# Configuration

This page lists every entry, group and key of the configuration, for reference. It is generated from the code by
`docs/generate.py`. Do not edit it.

An **entry** is a file of `conf/`. A **group** is a folder of `conf/`, and each of its files is a choice. A **key** is
one setting. Choices and keys are set on the command line; later ones win:

```bash
bash runall.sh -cn quality_sim model=qwen3.5-0.8b store=gib_16 arrivals.rate_rps=8
bash runall.sh -cn quality_sim --help      # groups, choices, and all keys with values and meanings
bash runall.sh -cn quality_sim --dry       # checks the settings and lists the planned runs
bash runall.sh -cn quality_sim --list arms  # its arms; also entries, choices of a group, or names that a key takes
bash runall.sh -cn quality_sim --cfg job   # the resolved configuration
```

An unknown key or choice ends the program with exit code 1. One sentence names the expected values.
"""

#: Root schema of each entry that is not a study.
ROOTS: dict[str, type[Any]] = {
    name: entry.schema for name, entry in ENTRIES.items() if name != "study"
}

#: Description of each folder of conf/.
GROUPS = {
    "arms": "Sets of arms. Each arm is a choice of `strategy` with changes.",
    "arrivals": "Arrival processes.",
    "batch": "Limits of a scheduler step.",
    "device": "Presets for `*_clean` entries: hardware model and batch of the device.",
    "executor": "Execution of arms: processes of this machine, or the workers of a Dask scheduler.",
    "fidelity": "Presets for `quality_fidelity` and `pic_fidelity`: how thorough the comparison is.",
    "hardware": "Peak rates of a device for `timing=roofline`, with assumed efficiencies.",
    "model": "Models, by the keys of a Hugging Face config.json; `model=` also takes a path or a hub name "
    "([models](models.md)).",
    "preamble": "Text before the prompts of a workload: `workload.preamble`.",
    "size": "Presets for `*_clean` entries: model, store and workload size.",
    "stages": "Stages of `first_light` in place of those for a GPU.",
    "store": "Memory budgets for KV, states and running requests together.",
    "strategy": "Strategies. Add one as an arm: `+strategy@arms.NAME=CHOICE`.",
    "timing": "Timing models of the simulator.",
    "tracking": "Experiment tracking.",
    "workload": "Workloads.",
}

SCALARS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def main() -> None:
    """Write the page to standard output."""
    sys.stdout.write(page())


def page() -> str:
    """Return the complete page as Markdown."""
    return "\n".join([HEAD, *entries(), *groups(), *names(), *keys()]).rstrip() + "\n"


def entries() -> Iterator[str]:
    """Yield the section of the entries: the files directly in conf/."""
    yield "## Entries\n"
    yield table(("entry", "schema", "content"), entry_rows())


def entry_rows() -> list[tuple[str, ...]]:
    """Return name, root schema and one sentence of each entry."""
    return [(f"`{name}`", root_link(name), escaped(text)) for name, text in described(None).items()]


def root_link(entry: str) -> str:
    """Return a link to the keys of an entry."""
    name = entry if entry in ROOTS else "study"
    return f"[{name}](#keys-of-{name})"


def groups() -> Iterator[str]:
    """Yield the section of the groups: the folders of conf/ with their choices."""
    yield "## Groups\n"
    for group in sorted(GROUPS):
        yield f"### Group {group}\n\n{GROUPS[group]}\n"
        rows = [
            (f"`{name}`", content_of(group, name, text)) for name, text in described(group).items()
        ]
        yield table(("choice", "content"), rows)


def names() -> Iterator[str]:
    """Yield the section of the names that plugins can extend, by the key that takes them."""
    yield "## Registered names\n"
    yield "A plugin can add a name to each of these keys ([extending](extending.md)).\n"
    for key, registry in registries().items():
        yield f"### Names of {key}\n"
        yield table(
            ("name", "meaning"),
            [(f"`{name}`", escaped(text)) for name, text in registered(registry).items()],
        )
        rows = (
            [] if isinstance(registry, Kinds) else list(option_rows(key, registry))
        )  # kinds are listed with the keys
        if rows:
            yield f"Options of names of {key}:\n"
            yield table(("name", "key", "type", "default", "meaning"), rows)


def option_rows(key: str, registry: Registry[Any]) -> Iterator[tuple[str, ...]]:
    """Yield the table rows of all options of the names of a registry."""
    for name in registry:
        for option, values, default, meaning in options_of(key, registry, name):
            usual = "required" if default == REQUIRED else f"`{shown(default)}`"
            yield f"`{name}`", f"`{option}`", escaped(values), usual, escaped(meaning)


def content_of(group: str, name: str, text: str) -> str:
    """Describe a choice: one sentence, and its values if they are few."""
    stored, path = choices_without_file().get((group, name)), CONF / group / f"{name}.yaml"
    loaded = stored.content if stored else yaml.safe_load(path.read_text())
    parts = [escaped(text), *chosen_by(loaded), arms_of(loaded) or values_of(loaded)]
    return " ".join(part for part in parts if part)


def chosen_by(loaded: dict[str, Any]) -> Iterator[str]:
    """Describe the defaults of a file: a choice that it extends, and choices of other groups."""
    for default in loaded.get("defaults", []):
        if isinstance(default, str) and default != "_self_" and not default.startswith("base_"):
            yield f"Extends `{default}`."
        elif isinstance(default, dict):
            overrides = (
                (key.removeprefix("override /"), choice)
                for key, choice in default.items()
                if key[:8] == "override"
            )
            yield from (f"`{group}={choice}`" for group, choice in overrides)


def arms_of(loaded: dict[str, Any]) -> str:
    """Return the names of the arms that a file defines."""
    chosen = [
        key
        for default in loaded.get("defaults", [])
        if isinstance(default, dict)
        for key in default
    ]
    names = [key.partition("@")[2] for key in chosen if key.startswith("/strategy@")]
    return ", ".join(f"`{name}`" for name in names)


def values_of(loaded: dict[str, Any]) -> str:
    """Return the values of a file as KEY=VALUE; empty if there are more than `MAX_VALUES`."""
    values = list(flat({key: value for key, value in loaded.items() if key != "defaults"}))
    if not 0 < len(values) <= MAX_VALUES:
        return ""
    return " ".join(f"`{key}={shown(value)}`" for key, value in values)


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def keys() -> Iterator[str]:
    """Yield all schemas: each dataclass once, under the first key that has it."""
    yield "## Keys\n\nA default in `conf/` takes precedence over the default shown here.\n"
    yield (
        "On the command line, a key of a study may be given by its short name: `slo.ttft_p95_s=0.5` sets\n"
        "`analyses.plan.slo.ttft_p95_s`. Errors, tables and `--help` use short names. A file sets the full key.\n"
    )
    paths = dict.fromkeys(PATHS, "workload.path")
    rows = [(f"`{name}`", f"`{key}`") for name, key in (SHORT_NAMES | paths).items()]
    yield table(("short name", "key"), rows)
    shown_at: dict[type[Any], str] = {}
    for name, schema in ({"study": Study} | ROOTS).items():
        yield f"### Keys of {name}\n\n{summary_of(schema)}\n"
        yield from section(schema, "", "" if schema is Study else f" of {name}", shown_at)


def section(
    schema: type[Any], prefix: str, root: str, shown_at: dict[type[Any], str]
) -> Iterator[str]:
    """Yield the table of a schema, then those of its nested schemas that were not shown yet.

    `root` is the end of their headings.
    """
    subschemas = nested(schema)
    for key, subschema in subschemas.items():
        shown_at.setdefault(subschema, f"{prefix}{key}{root}")
    if kinds_of(schema) is not None:
        yield table(
            ("kind", "key", "type", "default", "meaning"), rows_of_kinds(schema, prefix, shown_at)
        )
    else:
        yield table(("key", "type", "default", "meaning"), rows_of(schema, prefix, shown_at))
    for key, subschema in subschemas.items():
        heading = f"{prefix}{key}{root}"
        if shown_at[subschema] == heading:
            yield f"#### {heading}\n\n{summary_of(subschema)}\n"
            yield from section(subschema, f"{prefix}{key}.", root, shown_at)


def rows_of_kinds(
    schema: type[Any], prefix: str, shown_at: dict[type[Any], str]
) -> list[tuple[str, ...]]:
    """Return the table rows of the keys of all kinds: common ones, then those of most kinds
    first."""
    kinds, common = kinds_of(schema), rows_of(schema, prefix, shown_at)
    assert kinds is not None, "the schema is a base of kinds"
    taking: dict[tuple[str, ...], list[str]] = {}
    for name in kinds:
        for row in rows_of(kinds[name], prefix, shown_at)[len(common) :]:  # type: ignore[arg-type]
            taking.setdefault(row, []).append(f"`{name}`")
    ordered = sorted(taking.items(), key=lambda item: -len(item[1]))
    return [("every", *row) for row in common] + [
        (", ".join(names), *row) for row, names in ordered
    ]


def nested(schema: type[Any]) -> dict[str, type[Any]]:
    """Return the nested schemas by key; the key of a dict of schemas ends in .NAME, as in
    arms.NAME."""
    schemas: dict[str, type[Any]] = {}
    for key, hint in hints_of(schema).items():
        if (subschema := dataclass_in(hint)) is not None:
            schemas[f"{key}.NAME" if get_origin(hint) is dict else key] = subschema
    return schemas


def rows_of(
    schema: type[Any], prefix: str, shown_at: dict[type[Any], str]
) -> list[tuple[str, ...]]:
    """Return the table rows of a schema, one per key."""
    hints, meanings, choices = hints_of(schema), meanings_of(schema), choices_of(schema)
    rows = []
    for field in fields(schema):
        name, hint = field.name, hints[field.name]
        subschema = dataclass_in(hint)
        if subschema is None:
            kind = type_of(hint, choices.get(name, ()), bounds_of(field.metadata.get("check")))
        else:
            heading = shown_at[subschema]
            kind = (
                f"[{heading}](#{anchor(heading)}){' or null' if NoneType in get_args(hint) else ''}"
            )
        rows.append(
            (
                f"`{prefix}{name}`",
                kind,
                default_of(field, subschema),
                explained(schema, meanings, name),
            )
        )
    return rows


def explained(schema: type[Any], meanings: dict[str, str], key: str) -> str:
    """Return the meaning of a key.

    Raises:
        ValueError: the docstring of the class has no line for the key.
    """
    if not (text := meaning_of(meanings, key)):
        raise ValueError(
            f"{schema.__name__}.{key}: expected a line of the class's docstring for it"
        )
    return escaped(text)


def choices_of(schema: type[Any]) -> dict[str, tuple[str, ...]]:
    """Return the allowed values of the keys that `one_of` checks against names or literals."""
    declared = {field.name: field.metadata.get("check") for field in fields(schema)}
    choices = {
        key: tuple(names)
        for key, names in declared.items()
        if names is not None and not callable(names)
    }
    if (kinds := kinds_of(schema)) is not None:
        choices[kinds.key] = tuple(kinds)
    for base in schema.__mro__[:-1]:
        module = sys.modules[base.__module__]
        if getattr(module, base.__name__, None) is not base:
            continue  # made of a function, without source of its own
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            match node:
                case ast.Call(
                    ast.Name("one_of"),
                    [_, ast.Attribute(ast.Name("self"), key), ast.Name(constant)],
                ):
                    choices.setdefault(key, tuple(getattr(module, constant)))
                case ast.Call(
                    ast.Name("one_of"),
                    [_, ast.Attribute(ast.Name("self"), key), ast.Call(ast.Name(f), [])],
                ):
                    choices.setdefault(key, tuple(getattr(module, f)()))
                case ast.Call(
                    ast.Name("one_of"),
                    [_, ast.Attribute(ast.Name("self"), key), ast.Tuple() as values],
                ):
                    choices.setdefault(key, ast.literal_eval(values))
    return choices


def summary_of(schema: type[Any]) -> str:
    """Return the first paragraph of a schema's docstring."""
    return " ".join(inspect.cleandoc(schema.__doc__ or "").split("\n\n")[0].split())


def type_of(hint: Any, choices: tuple[str, ...], bounds: str = "") -> str:
    """Describe a type: its choices, or the kind of value with its bounds in words."""
    if isinstance(hint, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return f"{type_of(kinds[0], choices, bounds)}{',' if bounds else ''} or null"
    if get_origin(hint) is dict:
        return "values by name"
    if get_origin(hint) is list:
        return f"list of {SCALARS[get_args(hint)[0]]}"
    return ", ".join(f"`{choice}`" for choice in choices) or f"{SCALARS[hint]}{bounds}"


def default_of(field: Field[Any], subschema: type[Any] | None) -> str:
    """Return a default as YAML, or "required" if there is none."""
    if field.default == REQUIRED:
        return "required"
    if field.default is not MISSING:
        return f"`{shown(field.default)}`"
    assert field.default_factory is not MISSING, "a field has a default of either kind"
    default = field.default_factory()
    if (kinds := kinds_of(subschema)) is not None and (name := getattr(default, kinds.key)):
        return f"`{name}`"
    return "" if subschema is not None else f"`{shown(default)}`"


def shown(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(yaml.safe_dump(value, default_flow_style=True)).split("\n")[0]


def anchor(heading: str) -> str:
    """Return the anchor of a heading in the built page."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def escaped(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a head and rows as a Markdown table."""
    return "".join(
        "| " + " | ".join(cells) + " |\n" for cells in (head, ("---",) * len(head), *rows)
    )


if __name__ == "__main__":
    main()
