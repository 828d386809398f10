"""The console script. `--version` answers before the program is imported."""

from __future__ import annotations

import gc
import os
import sys

from spanlab.provenance import version


def main() -> None:
    """Run the command line."""
    # Imports, settings and requests stay alive: at the usual 700 allocations, visiting them takes a
    # sixth of the time.
    gc.set_threshold(1_000_000)
    # more threads would spin between the products of a summary
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "--version" in sys.argv[1:]:
        print(version())
        return
    from spanlab import cli

    try:
        cli.main()
    finally:
        gc.freeze()  # the process ends: its last collection has nothing to visit


if __name__ == "__main__":
    main()
