"""What the figures share: one curve per arm and order, over the sizes that were run."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from spanlab.report import look

Entries = list[dict[str, Any]]


def name_of(entry: dict[str, Any]) -> str:
    """The arm; with its order where it was asked in both."""
    return f"{entry['arm']}, same order" if entry["order"] == "same" else entry["arm"]


def curves(entries: Entries) -> dict[str, Entries]:
    """Entries by arm and order, short prompts first."""
    found: dict[str, Entries] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry["prompt_tokens"]):
        found[name_of(entry)].append(entry)
    order = {name: place for place, name in enumerate(dict.fromkeys(map(name_of, entries)))}
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))


def strokes(found: dict[str, Entries]) -> dict[str, look.Stroke]:
    """How each curve is drawn."""
    return look.strokes((name, own[0]["family"]) for name, own in found.items())
