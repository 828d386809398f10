"""Compare published numbers with those of an earlier commit, and fill what_changed.md.

    .venvs/sim/bin/python benchmarks/what_changed.py 6157aa2

Compares every arm of every headline.json below benchmarks/ that both commits have; equal numbers are omitted. Commits
before the headlines have a summary.json with the same keys.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pages import HERE, ROOT, fill_page, table

PAGE = HERE / "what_changed.md"
MISSING = "–"

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """A published number of one arm, as text with the published digits."""

    name: str
    text: Callable[[Summary], str]


class Cause(NamedTuple):
    """A reason, with regular expressions of the studies, arms and measures that it changes."""

    text: str
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
#: Every cause that applies to a row is listed. Add a missing cause here.
CAUSES = (
    Cause("`dp` clips match mass beyond a prompt to its end; it dropped it", "", r"^dp_"),
    Cause("requests of one step share blocks; output is stored and takes memory", "(pic|rag)_sim", r"^(?!none)"),
    Cause("least recently used counts from the end of use", "sim|clean", r"^(?!none|kv_only)"),
    Cause(
        "the roofline prices span reads, rotations and forwards", "(pic|rag)_sim", r"pic|lego|blend|ape", "TTFT|speedup"
    ),
    Cause("`cache_blend` scores values only, as published", "", r"cache_blend"),
    Cause("measured again on this machine", "clean/.*(engine|_cpu$)", "", "TTFT|speedup"),
    Cause("a recurrent state holds kernel − 1 inputs of the convolution", "quality|families|hybrid|interval|junction"),
    Cause("blocks of hybrids have the tokens that vLLM computes: 784 for the 27B", "quality", r"vllm_|block_hash"),
    Cause("percentiles over the requests of all seeds; none where too few carry it", "", "", "p99"),
    Cause("ratio of means, not mean of ratios; none where a queue grows", "", "", "speedup"),
)


def main() -> None:
    """Print the table and fill the page."""
    old = sys.argv[1]
    rows = [row for path in published(old) for row in changes(path, old)]
    head = ("study", "arm", "quantity", f"at {old}", "now", "changes that apply")
    content = table(head, rows) if rows else "No published number changed.\n"
    fill_page(PAGE, "numbers", content)
    print(content)


def published(commit: str) -> list[str]:
    """Return the paths of results with arms that exist both at the commit and now."""
    listed = _git("ls-tree", "-r", "--name-only", commit, "benchmarks").splitlines()
    results = [path for path in listed if path.endswith(("/headline.json", "/summary.json"))]
    return [path for path in results if _now(path).is_file() and "arms" in _at(commit, path)]


def _now(path: str) -> Path:
    return (ROOT / path).with_name("headline.json")


def changes(path: str, commit: str) -> Iterator[tuple[str, ...]]:
    """Yield one row for each published number that differs in the study at `path`."""
    then, now = _at(commit, path)["arms"], json.loads(_now(path).read_text())["arms"]
    study = path.removeprefix("benchmarks/").rpartition("/")[0]
    for arm in then:
        for measure in MEASURES:
            before = measure.text(then[arm])
            after = measure.text(now[arm]) if arm in now else "no such arm"
            if before != after:
                yield study, f"`{arm}`", measure.name, before, after, causes(study, arm, measure.name)


def causes(study: str, arm: str, measure: str) -> str:
    """Return every cause that changes this number."""
    labels = (study, arm, measure)
    texts = [
        cause.text
        for cause in CAUSES
        if all(re.search(pattern, text) for pattern, text in zip(cause[1:], labels, strict=True))
    ]
    return "; ".join(texts) or "not attributed"


def _at(commit: str, path: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(_git("show", f"{commit}:{path}"))
    return summary


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
