"""Input of the figures of prefills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Entry = dict[str, Any]


@dataclass(frozen=True)
class PrefillData:
    """Entries of one study, or of all points of a sweep.

    `labels`    names of the label columns
    `baseline`  the arm that speedups are relative to
    `footer`    the provenance line under every figure
    """

    entries: list[Entry]
    labels: tuple[str, ...]
    baseline: str
    footer: str

    def name(self, entry: Entry) -> str:
        """Return the labels of an entry as text, without empty ones."""
        return ", ".join(_label_text(label, entry[label]) for label in self.labels if entry[label] != "")

    def lengths(self) -> list[float]:
        """Prompt lengths, short to long."""
        return sorted({entry["prompt_tokens"] for entry in self.entries})

    def without_baseline(self) -> list[Entry]:
        """Return the entries of all arms except the baseline."""
        return [entry for entry in self.entries if entry["arm"] != self.baseline]

    def families(self) -> dict[str, str]:
        """The family of each arm."""
        return {entry["arm"]: entry["family"] for entry in self.entries}


def _label_text(label: str, value: str | int) -> str:
    return value if isinstance(value, str) else f"{label} {value}"


def curve(entries: list[Entry]) -> list[Entry]:
    """Entries by prompt length, short to long."""
    return sorted(entries, key=lambda entry: float(entry["prompt_tokens"]))
