"""Print docs/configuration.md: every key of the schemas and every file of conf/.

    .venvs/sim/bin/python docs/generate.py > docs/configuration.md

Keys, types and defaults are those of the dataclasses in `spanlab.settings`. Meanings are the
entries of their docstrings; a key without one is an error. Choices are read from the calls of
`one_of` in the same class.
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
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from spanlab.checks import REQUIRED
from spanlab.cli.describe import dataclass_in, first_sentence, meaning_of, meanings_of
from spanlab.settings import Compare, MakeShape, Schedule, Study
from spanlab.settings.conformance import Conformance
from spanlab.settings.export import Export
from spanlab.settings.first_light import FirstLight
from spanlab.settings.probe import HybridAnswers, TrainProbe
from spanlab.settings.tail_replay import TailReplay

CONF = Path(__file__).resolve().parents[1] / "conf"
MOST_VALUES = 11  # of a choice, to be shown

HEAD = """\
# Configuration

This page is generated from the code by `docs/generate.py`. Do not edit it.

An **entry** is a file of `conf/`. A **group** is a folder of `conf/`, and each of its files is a choice. A **key** is
one setting. Choices and keys are set on the command line; later ones win:

```bash
bash runall.sh -cn quality_sim model=qwen3.5-0.8b store=gib_16 arrivals.rate_rps=8
bash runall.sh -cn quality_sim --help      # groups, choices, and all keys with values and meanings
bash runall.sh -cn quality_sim --dry       # checks the settings and says what would run
bash runall.sh -cn quality_sim --list arms  # its arms; also entries, figures, or the choices of a group
bash runall.sh -cn quality_sim --cfg job   # the resolved configuration
```

An unknown key or choice ends the program with exit code 1 and one sentence that names the expected values.
"""

#: The root schema of each entry that is no study.
ROOTS: dict[str, type[Any]] = {
    "make_shape": MakeShape,
    "schedule": Schedule,
    "compare": Compare,
    "export": Export,
    "train_probe": TrainProbe,
    "hybrid_answers": HybridAnswers,
    "tail_replay": TailReplay,
    "conformance": Conformance,
    "first_light": FirstLight,
}

#: What a folder of conf/ chooses.
GROUPS = {
    "arms": "Sets of arms. Each arm is a choice of `strategy` with changes.",
    "arrivals": "Arrival processes.",
    "batch": "Limits of a scheduler step.",
    "device": "Presets for `*_clean` entries: hardware model and batch of the device.",
    "executor": "Where arms run: processes of this machine, or the workers of a Dask scheduler.",
    "fidelity": "Presets for `quality_fidelity` and `pic_fidelity`: how thorough the comparison is.",
    "hardware": "Peak rates of a device for `timing=roofline`, with assumed efficiencies.",
    "model": "Models, by the keys of a Hugging Face config.json; `model=` also takes a path or a hub name "
    "([models](models.md)).",
    "preamble": "What stands before the prompts of a workload: `workload.preamble`.",
    "size": "Presets for `*_clean` entries: model, store and workload size.",
    "stages": "Stages of `first_light`: at full size on a card, or as small as they get.",
    "store": "Memory budgets for KV, states and running requests together.",
    "strategy": "Strategies. Add one as an arm: `+strategy@arms.NAME=CHOICE`.",
    "timing": "Timing models of the simulator.",
    "tracking": "Experiment tracking.",
    "training": "Presets for `train_probe`: new weights, more steps on spans encoded apart, or a quick check.",
    "workload": "Workloads.",
}

SCALARS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def main() -> None:
    """Print the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEAD, *entries(), *groups(), *keys()]).rstrip() + "\n"


def entries() -> Iterator[str]:
    """The files of conf/ itself."""
    yield "## Entries\n"
    yield table(("entry", "schema", "content"), entry_rows())


def entry_rows() -> list[tuple[str, ...]]:
    """Entry, root schema and first sentence of each file."""
    paths = sorted(path for path in CONF.glob("*.yaml") if path.stem != "config")
    return [(f"`{path.stem}`", root_link(path.stem), escaped(first_sentence(path))) for path in paths]


def root_link(entry: str) -> str:
    """A link to the keys of an entry."""
    name = entry if entry in ROOTS else "study"
    return f"[{name}](#keys-of-{name})"


def groups() -> Iterator[str]:
    """The folders of conf/, each with its choices."""
    yield "## Groups\n"
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir() and path.name in GROUPS):
        yield f"### Group {folder.name}\n\n{GROUPS[folder.name]}\n"
        rows = [(f"`{path.stem}`", content_of(path)) for path in sorted(folder.glob("*.yaml"))]
        yield table(("choice", "content"), rows)


def content_of(path: Path) -> str:
    """What a choice is: the first sentence of its comment, and its values where they are few."""
    loaded = yaml.safe_load(path.read_text())
    parts = [escaped(first_sentence(path)), *chosen_by(loaded), arms_of(loaded) or values_of(loaded)]
    return " ".join(part for part in parts if part)


def chosen_by(loaded: dict[str, Any]) -> Iterator[str]:
    """What a file takes from other files: a choice that it extends, and choices of other groups."""
    for part in loaded.get("defaults", []):
        if isinstance(part, str) and part != "_self_" and not part.startswith("base_"):
            yield f"Extends `{part}`."
        elif isinstance(part, dict):
            found = ((key.removeprefix("override /"), choice) for key, choice in part.items() if key[:8] == "override")
            yield from (f"`{group}={choice}`" for group, choice in found)


def arms_of(loaded: dict[str, Any]) -> str:
    """Names of the arms that a file defines."""
    chosen = [key for part in loaded.get("defaults", []) if isinstance(part, dict) for key in part]
    names = [key.partition("@")[2] for key in chosen if key.startswith("/strategy@")]
    return ", ".join(f"`{name}`" for name in names)


def values_of(loaded: dict[str, Any]) -> str:
    """The values of a file as KEY=VALUE, unless there are many."""
    found = list(flat({key: value for key, value in loaded.items() if key != "defaults"}))
    if not 0 < len(found) <= MOST_VALUES:
        return ""
    return " ".join(f"`{key}={shown(value)}`" for key, value in found)


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def keys() -> Iterator[str]:
    """All schemas: each dataclass once, under the first key that has it."""
    yield "## Keys\n\nA default in `conf/` takes precedence over the default shown here.\n"
    shown_at: dict[type[Any], str] = {}
    for name, schema in ({"study": Study} | ROOTS).items():
        yield f"### Keys of {name}\n\n{summary_of(schema)}\n"
        yield from section(schema, "", "" if schema is Study else f" of {name}", shown_at)


def section(schema: type[Any], prefix: str, root: str, shown_at: dict[type[Any], str]) -> Iterator[str]:
    """The table of one schema, then those of its parts that were not shown yet; `root` ends their headings."""
    parts = nested(schema)
    for key, part in parts.items():
        shown_at.setdefault(part, f"{prefix}{key}{root}")
    yield table(("key", "type", "default", "meaning"), rows_of(schema, prefix, shown_at))
    for key, part in parts.items():
        heading = f"{prefix}{key}{root}"
        if shown_at[part] == heading:
            yield f"#### {heading}\n\n{summary_of(part)}\n"
            yield from section(part, f"{prefix}{key}.", root, shown_at)


def nested(schema: type[Any]) -> dict[str, type[Any]]:
    """The schemas of a schema's keys; an arm's key is shown as arms.NAME."""
    found: dict[str, type[Any]] = {}
    for key, hint in get_type_hints(schema).items():
        if (part := dataclass_in(hint)) is not None:
            found[f"{key}.NAME" if get_origin(hint) is dict else key] = part
    return found


def rows_of(schema: type[Any], prefix: str, shown_at: dict[type[Any], str]) -> list[tuple[str, ...]]:
    """One line per key."""
    hints, meanings, choices = get_type_hints(schema), meanings_of(schema), choices_of(schema)
    rows = []
    for field in fields(schema):
        name, hint = field.name, hints[field.name]
        part = dataclass_in(hint)
        if part is None:
            kind = type_of(hint, choices.get(name, ()))
        else:
            kind = f"[{shown_at[part]}](#{anchor(shown_at[part])}){' or null' if NoneType in get_args(hint) else ''}"
        rows.append((f"`{prefix}{name}`", kind, default_of(field, part), explained(schema, meanings, name)))
    return rows


def explained(schema: type[Any], meanings: dict[str, str], key: str) -> str:
    """The meaning of a key; ValueError where its docstring has none."""
    if not (words := meaning_of(meanings, key)):
        raise ValueError(f"{schema.__name__}.{key}: expected a line of the class's docstring for it")
    return escaped(words)


def choices_of(schema: type[Any]) -> dict[str, tuple[str, ...]]:
    """Values that a key may have, where `one_of` checks them against names or literals."""
    found: dict[str, tuple[str, ...]] = {}
    for base in schema.__mro__[:-1]:
        module = sys.modules[base.__module__]
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            match node:
                case ast.Call(ast.Name("one_of"), [_, ast.Attribute(ast.Name("self"), key), ast.Name(constant)]):
                    found.setdefault(key, tuple(getattr(module, constant)))
                case ast.Call(ast.Name("one_of"), [_, ast.Attribute(ast.Name("self"), key), ast.Call(ast.Name(f), [])]):
                    found.setdefault(key, tuple(getattr(module, f)()))
                case ast.Call(ast.Name("one_of"), [_, ast.Attribute(ast.Name("self"), key), ast.Tuple() as given]):
                    found.setdefault(key, ast.literal_eval(given))
    return found


def summary_of(schema: type[Any]) -> str:
    """The first paragraph of a schema's docstring."""
    return " ".join(inspect.cleandoc(schema.__doc__ or "").split("\n\n")[0].split())


def type_of(hint: Any, choices: tuple[str, ...]) -> str:
    """A type in words: its choices, or the kind of value."""
    if isinstance(hint, UnionType):
        others = [kind for kind in get_args(hint) if kind is not NoneType]
        return f"{type_of(others[0], choices)} or null"
    if get_origin(hint) is dict:
        return "values by name"
    if get_origin(hint) is list:
        return f"list of {SCALARS[get_args(hint)[0]]}"
    return ", ".join(f"`{choice}`" for choice in choices) or SCALARS[hint]


def default_of(field: Field[Any], part: type[Any] | None) -> str:
    """A default as YAML; "required" where there is none."""
    if field.default == REQUIRED:
        return "required"
    if field.default is not MISSING:
        return f"`{shown(field.default)}`"
    assert field.default_factory is not MISSING, "a field has a default of either kind"
    return "" if part is not None else f"`{shown(field.default_factory())}`"


def shown(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, str):
        return value or '""'
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(yaml.safe_dump(value, default_flow_style=True)).split("\n")[0]


def anchor(heading: str) -> str:
    """The anchor of a heading in the built page."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def escaped(words: str) -> str:
    """Words that may stand in a cell of a table."""
    return words.replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Rows under their head, as Markdown."""
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (head, ("---",) * len(head), *rows))


if __name__ == "__main__":
    main()
