"""Compare published summaries with those of an earlier commit; fill what_changed.md.

    .venvs/sim/bin/python benchmarks/what_changed.py 6157aa2

Every arm of every summary.json below benchmarks/ that both have; equal numbers are left out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from publish import HERE, ROOT, filled
from texts import table

PAGE = HERE / "what_changed.md"
MISSING = "–"

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """A published number of one arm, as text with the digits that are published."""

    name: str
    text: Callable[[Summary], str]


class Cause(NamedTuple):
    """A reason, and the studies, arms and measures (regular expressions) that it changes."""

    words: str
    studies: str = ""
    arms: str = ""
    measures: str = ""


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{1e3 * value:.3g} ms"


def _ratio(speedup: Summary | None) -> str:
    return MISSING if not speedup or speedup["mean"] is None else f"{speedup['mean']:.2f} ×"


MEASURES = (
    Measure("token hit rate", lambda arm: f"{100 * arm['token_hit_rate']:.1f} %"),
    Measure("mean TTFT", lambda arm: _seconds(arm["ttft_s"]["mean"])),
    Measure("p99 TTFT", lambda arm: _seconds(arm["ttft_s"]["p99"])),
    Measure("speedup", lambda arm: _ratio(arm.get("speedup"))),
)
#: All that apply to a row are named; add what a row lacks.
CAUSES = (
    Cause("`dp` clips match mass beyond a prompt to its end; it dropped it", "", r"^dp_"),
    Cause("requests of one step share blocks; output is stored and takes memory", "(pic|rag)_sim", r"^(?!none)"),
    Cause("least recently used counts from the end of use", "sim|clean", r"^(?!none|kv_only)"),
    Cause(
        "the roofline prices span reads, rotations and forwards", "(pic|rag)_sim", r"pic|lego|blend|ape", "TTFT|speedup"
    ),
    Cause("`cache_blend` scores values only, as published", "", r"cache_blend"),
    Cause("measured again on this machine", "clean/.*(engine|_cpu$)", "", "TTFT|speedup"),
    Cause("percentiles over the requests of all seeds; none where too few carry it", "", "", "p99"),
    Cause("ratio of means, not mean of ratios; none where a queue grows", "", "", "speedup"),
)


def main() -> None:
    """Print and fill the table."""
    old = sys.argv[1]
    rows = [row for path in published(old) for row in changes(path, old)]
    head = ("study", "arm", "quantity", f"at {old}", "now", "changes that apply")
    content = table(head, rows) if rows else "No published number changed.\n"
    PAGE.write_text(filled(PAGE.read_text(), "numbers", content))
    print(content)


def published(commit: str) -> list[str]:
    """Paths of the summaries with arms that the commit has, and that are here too."""
    listed = _git("ls-tree", "-r", "--name-only", commit, "benchmarks").splitlines()
    found = [path for path in listed if path.endswith("/summary.json") and (ROOT / path).is_file()]
    return [path for path in found if "arms" in _at(commit, path)]


def changes(path: str, commit: str) -> Iterator[tuple[str, ...]]:
    """One row for each published number of the study at `path` that differs."""
    then, now = _at(commit, path)["arms"], json.loads((ROOT / path).read_text())["arms"]
    study = path.removeprefix("benchmarks/").removesuffix("/summary.json")
    for arm in then:
        for measure in MEASURES:
            before = measure.text(then[arm])
            after = measure.text(now[arm]) if arm in now else "no such arm"
            if before != after:
                yield study, f"`{arm}`", measure.name, before, after, causes(study, arm, measure.name)


def causes(study: str, arm: str, measure: str) -> str:
    """Every cause that changes this number."""
    given = (study, arm, measure)
    words = [
        cause.words
        for cause in CAUSES
        if all(re.search(pattern, text) for pattern, text in zip(cause[1:], given, strict=True))
    ]
    return "; ".join(words) or "not attributed"


def _at(commit: str, path: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(_git("show", f"{commit}:{path}"))
    return summary


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
