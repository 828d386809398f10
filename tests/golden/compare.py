"""Compare two golden sets: `python tests/golden/compare.py OLD NEW [--renamed FILE]`; exit code 1 on any difference.

`--renamed FILE` is a JSON object of texts by their old form: deliberate changes, applied to OLD before the comparison.
"""

from __future__ import annotations

import argparse
import json
from itertools import zip_longest
from pathlib import Path


def differences(old: Path, new: Path, renamed: dict[str, str]) -> list[str]:
    """Return one line per file that differs: its name, and its first different line in both sets."""
    names = {path.relative_to(folder) for folder in (old, new) for path in folder.rglob("*") if path.is_file()}
    found = []
    for name in sorted(names):
        missing = [str(folder) for folder in (old, new) if not (folder / name).exists()]
        if missing:
            found.append(f"{name}: missing in {missing[0]}")
            continue
        before, after = (old / name).read_text(), (new / name).read_text()
        for text, replacement in renamed.items():
            before = before.replace(text, replacement)
        if before != after:
            found.append(f"{name}: {_first_difference(before, after)}")
    return found


def _first_difference(before: str, after: str) -> str:
    pairs = zip_longest(before.splitlines(), after.splitlines(), fillvalue="(end)")
    number, (left, right) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    start = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
    shown = slice(max(0, start - 60), start + 100)
    return f"line {number}:\n  - {left[shown]}\n  + {right[shown]}"


def main() -> None:
    """Print the differences of two sets, and end with exit code 1 where there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--renamed", type=Path)
    chosen = parser.parse_args()
    renamed = json.loads(chosen.renamed.read_text()) if chosen.renamed else {}
    for folder in (chosen.old, chosen.new):
        if not any(path.is_file() for path in folder.rglob("*")):
            raise SystemExit(f"{folder}: expected a golden set, there is no file")
    found = differences(chosen.old, chosen.new, renamed)
    count = sum(1 for path in chosen.new.rglob("*") if path.is_file())
    print("\n".join([*found, f"{len(found)} of {count} files differ"]))
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
