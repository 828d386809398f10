"""`quality_sim` of this checkout and of another, in turns: what changed the code, told apart from what the machine did.

    .venvs/sim/bin/python benchmarks/must_hold/in_turns.py OTHER [PAIRS]

OTHER is a checkout of another commit, for instance the one that `results.json` was measured at. After a run of each
that does not count, PAIRS (10) of whole processes are timed from outside. Prints the ratio of wall seconds, this ÷
other, with its 95 % interval over the pairs, and writes `in_turns.json` beside this file.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure import HERE, ROOT, machine

from spanlab.stats import paired_ratio_interval


def seconds(checkout: Path) -> float:
    """Wall seconds of one run there."""
    began = time.perf_counter()
    command = ["bash", str(checkout / "runall.sh"), "-cn", "quality_sim", "tracking=none"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def commit(checkout: Path) -> str:
    """The commit that is checked out there; ValueError where files differ from it."""
    git = ["git", "-C", str(checkout)]
    if changed := subprocess.check_output([*git, "status", "--porcelain"], text=True):
        raise ValueError(f"{checkout} has changes, expected a clean checkout: {changed.split()[-1]}")
    return subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()


def main() -> None:
    """Measure in turns, print, write down."""
    other, pairs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
    checkouts = {"this": ROOT, "other": other}
    commits = {name: commit(checkout) for name, checkout in checkouts.items()}
    for checkout in checkouts.values():
        seconds(checkout)
    walls: dict[str, list[float]] = {"this": [], "other": []}
    for pair in range(pairs):
        # whoever is second finds the machine as the first one left it, so they change places
        for name in sorted(checkouts, reverse=bool(pair % 2)):
            walls[name].append(seconds(checkouts[name]))
    ratio = paired_ratio_interval(walls["this"], walls["other"])
    results = {
        "machine": machine(),
        "pairs": pairs,
        "commits": commits,
        "wall_s": {name: statistics.median(values) for name, values in walls.items()},
        "walls_s": walls,
        "ratio": ratio._asdict(),
    }
    (HERE / "in_turns.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
