"""Time and memory of a million requests: a Mooncake trace that repeats.

    .venvs/sim/bin/python benchmarks/must_hold/million.py LOG [REQUESTS] [KEY=VALUE ...]

LOG is a Mooncake trace. It is written again and again, each time one trace later, until there are REQUESTS (1,000,000).
One process loads that log and simulates it as `log_speed.py` does, with a full record per request; its peak memory is
the kernel's. Writes `million.json` beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
from in_turns import commit
from log_speed import ROOT, in_checkout
from measure import HERE, machine


def repeated(rows: list[dict[str, object]]) -> Iterator[dict[str, object]]:
    """The rows of a trace without end; a trace lasts as long as it does, and one mean gap."""
    times = [int(str(row["timestamp"])) for row in rows]
    lasts = (times[-1] - times[0]) * len(rows) // (len(rows) - 1)
    for turn in count():
        for row, at in zip(rows, times, strict=True):
            yield row | {"timestamp": at + turn * lasts}


def main() -> None:
    """Write the log, serve it, print and write down what it took."""
    log, *rest = sys.argv[1:]
    requests = next((int(one) for one in rest if one.isdigit()), 1_000_000)
    keys = [one for one in rest if "=" in one]
    rows = [orjson.loads(line) for line in Path(log).read_bytes().splitlines()]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "repeated.jsonl"
        with path.open("wb") as file:
            for row in islice(repeated(rows), requests):
                file.write(orjson.dumps(row) + b"\n")
        found = in_checkout(ROOT, str(path), keys)
    told = {"machine": machine(), "commit": commit(ROOT), "log": Path(log).name, "keys": keys, "run": found}
    (HERE / "million.json").write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
