"""The console script. `--version` answers before the program is imported."""

from __future__ import annotations

import sys

from spanlab.provenance import version


def main() -> None:
    """Run the command line."""
    if "--version" in sys.argv[1:]:
        print(version())
        return
    from spanlab import cli

    cli.main()


if __name__ == "__main__":
    main()
