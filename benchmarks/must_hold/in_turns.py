"""`quality_sim` of this checkout and of another, in turns: what changed the code, told apart from what the machine did.

    .venvs/sim/bin/python benchmarks/must_hold/in_turns.py OTHER [PAIRS]

OTHER is a checkout of another commit, for instance the one that `results.json` was measured at. After a run of each
that does not count, PAIRS (10) of whole processes are timed from outside. Prints the ratio of wall seconds, this ÷
other, with its 95 % interval over the pairs, and writes `in_turns.json` beside this file.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, timed, write_results
from pages import ROOT

from spanlab.provenance import machine
from spanlab.stats import paired_ratio_interval


def seconds(checkout: Path) -> float:
    """Wall seconds of one run there."""
    command = ["bash", str(checkout / "runall.sh"), "-cn", "quality_sim", "tracking=none"]
    quiet = subprocess.DEVNULL
    return timed(lambda: subprocess.run(command, stdout=quiet, stderr=quiet, check=True))


def main() -> None:
    """Measure in turns, print, write down."""
    other, pairs = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
    checkouts = {"this": ROOT, "other": other}
    commits = {name: clean_commit(checkout) for name, checkout in checkouts.items()}
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
    print(write_results(HERE / "in_turns.json", results))


if __name__ == "__main__":
    main()
