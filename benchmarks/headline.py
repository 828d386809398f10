"""The published form of a run: headline.json, CSV files and small figures, instead of the run's whole folder.

`headline.json` has the origin of a run, four numbers of each arm, and the numbers that texts of the pages quote.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from PIL import Image

from spanlab.model_spec import ModelSpec
from spanlab.study.folder import settings_yaml

Summary = Mapping[str, Any]
#: Where a number comes from.
ORIGIN = (
    *("study", "workload", "model", "hardware", "timing", "backend", "engine", "store", "seeds", "caveats"),
    *("commit", "machine", "compiled", "versions", "wall_s"),
)
#: Numbers of each arm, which `what_changed.py` compares.
OF_ARMS = ("arms.*.token_hit_rate", "arms.*.ttft_s.mean", "arms.*.ttft_s.p99", "arms.*.speedup.mean")
LINES = 200  # of a headline
WIDTH = 160
FIGURE_BYTES = 80_000
COLOURS = (256, 128, 64, 32)


def headline(summary: Summary, numbers: Sequence[str], config: Any, date: str) -> dict[str, Any]:
    """Return the headline of a run.

    numbers  dotted keys of the summary, with * for every key and digits for one item of a list
    config   settings of the run
    date     of its commit
    """
    found = {key: summary[key] for key in ORIGIN if summary.get(key) is not None}
    if "points" in summary:
        found["points"] = len(summary["points"])
    found |= {"clean": not summary["commit"].endswith("-dirty"), "date": date, "schema": schema_of(summary)}
    found |= {"config": config_hash(config), "sizes": sizes_of(config)}
    for key in (*OF_ARMS, *numbers):
        _merge(found, _pick(summary, key.split(".")))
    return found


def schema_of(summary: Summary) -> dict[str, str]:
    """Return the hash of the keys of an arm, and of a row, as far as the summary has them."""
    groups = {"arm": list(summary.get("arms", {}).values()), "row": summary.get("rows", [])}
    return {name: keys_hash(set().union(*group)) for name, group in groups.items() if group}


def keys_hash(keys: Iterable[str]) -> str:
    """Return the hash of a set of keys."""
    return _hash(",".join(sorted(keys)))


def config_hash(config: Any) -> str:
    """Return the hash of the settings that decide the results; an absent setting counts as one that is null."""
    return _hash(settings_yaml(_without_null(asdict(config))))


def sizes_of(config: Any) -> dict[str, Any] | None:
    """Return the sizes of the model of a study; None for a script's own model."""
    model = getattr(config, "model", None)
    return _without_null(asdict(model)) if isinstance(model, ModelSpec) else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_null(value: Any) -> Any:
    """Return sorted settings without null and empty ones."""
    if not isinstance(value, dict):
        return [_without_null(item) for item in value] if isinstance(value, (list, tuple)) else value
    kept = {str(key): _without_null(item) for key, item in sorted(value.items(), key=lambda entry: str(entry[0]))}
    return {key: item for key, item in kept.items() if item is not None and item not in ({}, [])}


def _pick(value: Any, keys: Sequence[str]) -> Any:
    """Return the part of a summary below a dotted key, inside its parents; empty where there is none."""
    if not keys or value is None:
        return value
    if isinstance(value, list):
        return [_pick(value[int(keys[0])], keys[1:])]
    names = [name for name in value if keys[0] in ("*", name)]
    return {name: _pick(value[name], keys[1:]) for name in names}


def _merge(into: dict[str, Any], found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def to_text(value: Any, indent: int = 0) -> str:
    """Return JSON text in which what fits on a line takes one line."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or (indent and len(line) + indent <= WIDTH):
        return line
    inner = " " * (indent + 1)
    if isinstance(value, list):
        items = [to_text(item, indent + 1) for item in value]
    else:
        items = [f"{json.dumps(key)}: {to_text(item, indent + 1)}" for key, item in value.items()]
    open_, close = "[]" if isinstance(value, list) else "{}"
    return open_ + ",".join(f"\n{inner}{item}" for item in items) + f"\n{' ' * indent}{close}"


def write_headline(folder: Path, found: Summary) -> None:
    """Write `headline.json`."""
    (folder / "headline.json").write_text(f"{to_text(found)}\n")


def flat_rows(summary: Summary, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return a list of a summary as flat rows with dotted keys.

    keys  the list; optionally, a list inside each of its entries, whose items then make a row each
    """
    name, *inside = keys
    rows = []
    for entry in summary[name]:
        for key in inside:
            parent = {name: value for name, value in entry.items() if name != key}
            rows += [dict(_flat(parent | {key: item})) for item in entry[key]]
        if not inside:
            rows.append(dict(_flat(entry)))
    return rows


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV: a column for every key."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue())


def read_data(path: Path) -> Any:
    """Return published data: JSON, or rows of a CSV file with numbers as float, and None in empty cells."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    with path.open(newline="") as file:
        return [{key: _value(cell) for key, cell in row.items()} for row in csv.DictReader(file)]


def _value(cell: str) -> str | float | bool | None:
    if cell in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[cell]
    try:
        return float(cell)
    except ValueError:
        return cell


def copy_figure(source: Path, target: Path) -> None:
    """Copy a PNG, with as many colours of a palette as fit into `FIGURE_BYTES` where it is larger."""
    data = source.read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        for colours in COLOURS:
            if len(data) <= FIGURE_BYTES:
                break
            encoded = io.BytesIO()
            method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
            image.convert("RGB").quantize(colours, method, dither=dither).save(encoded, "PNG", optimize=True)
            data = encoded.getvalue()
    target.write_bytes(data)
