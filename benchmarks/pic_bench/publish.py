"""Publish a run of pic_bench: copy its summary, settings and figures here, fill README.md and docs/results.md.

    bash runall.sh -cn pic_bench engine.threads=1 output.run=published
    .venvs/engine/bin/python benchmarks/pic_bench/publish.py [outputs/pic_bench/published]

No number in either is typed by hand.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WITHHELD = "withheld: the machine was too noisy"
RESULTS = ROOT / "docs" / "results.md"
HEAD = (
    "| size | arm | order | prompt tokens | token hit rate | cold TTFT | warm TTFT p50 | quartiles | its bound | of it "
    "| speedup | ratio of bounds |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Copy, then fill."""
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "outputs" / "pic_bench" / "published"
    for name in ("config.yaml", "summary.json"):
        shutil.copy(run / name, HERE / name)
    figures = HERE / "figures"
    shutil.rmtree(figures, ignore_errors=True)
    figures.mkdir()
    for path in sorted((run / "figures").glob("*.png")):
        shutil.copy(path, figures / path.name)
    summary = json.loads((run / "summary.json").read_text())
    readme = HERE / "README.md"
    readme.write_text(filled(filled(readme.read_text(), "bars", bars(summary)), "table", table(summary)))
    RESULTS.write_text(filled(RESULTS.read_text(), "pic_bench", short(summary)))


def filled(text: str, mark: str, content: str) -> str:
    """`text` with what stands between the two marks replaced."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", re.DOTALL)
    assert pattern.search(text), f"the page has no place for {mark}"
    return pattern.sub(lambda found: found[1] + content + found[2], text)


def bars(summary: dict[str, Any]) -> str:
    """What must hold of plain PIC on the largest documents, beside what was measured."""
    pic = [entry for entry in summary["entries"] if entry["arm"] == "pic"][-1]
    speedup, times = pic["speedup"], pic["warm_ttft_s"]
    what = f"plain PIC, {pic['size']} documents, {pic['prompt_tokens']:,.0f} tokens"
    head = f"| {what} | must be | measured |\n|---|---|---|\n"
    rows = (
        (
            "TTFT, cold ÷ warm, median (quartiles)",
            "20 × or more",
            f"{speedup['p50']:.1f} × ({speedup['p25']:.1f} to {speedup['p75']:.1f})" if speedup else WITHHELD,
        ),
        (
            "TTFT ÷ its own bound, median (least)",
            "2 or less",
            f"{times['p50'] / pic['bound_s']:.2f} ({times['least'] / pic['bound_s']:.2f})",
        ),
    )
    return head + "".join(f"| {what} | {bar} | {found} |\n" for what, bar, found in rows)


def table(summary: dict[str, Any]) -> str:
    """Where it was measured, and every entry as Markdown."""
    rates, versions = summary["rates"], summary["versions"] | summary["engine"]
    where = (
        f"Measured on {summary['machine']}, {summary['device']}, {summary['threads']} threads; {summary['weights']} "
        f"weights in {summary['dtype']}, {summary['tokenizer']} tokenizer; "
        f"matmul {rates['flops_per_s'] / 1e9:.3g} GFLOP/s and copy {rates['bytes_per_s'] / 1e9:.3g} GB/s, measured; "
        f"Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}, "
        f"commit {summary['commit']}. Load average of the machine {' to '.join(map(str, summary['load']))}."
    )
    return "\n".join([where, noise(summary), HEAD, *map(line, summary["entries"])]) + "\n"


def short(summary: dict[str, Any]) -> str:
    """The largest documents alone, for docs/results.md."""
    size = summary["entries"][-1]["size"]
    entries = [entry for entry in summary["entries"] if entry["size"] == size]
    head = (
        f"| {size}: {entries[0]['prompt_tokens']:,.0f} tokens | tokens reused | TTFT, again (quartiles) | its bound "
        "| cold ÷ again | ratio of bounds |\n|---|---|---|---|---|---|\n"
    )
    where = (
        f"\nOn {summary['device']} of {summary['machine']}, {summary['threads']} thread, `tiny` with "
        f"{summary['weights']} weights in {summary['dtype']}, commit {summary['commit']}; all sizes in "
        "[`benchmarks/pic_bench`](../benchmarks/pic_bench/README.md). The bound is work ÷ this machine's own matrix "
        "and copy rates.\n"
    )
    return head + "".join(map(short_line, entries)) + where + noise(summary)


def short_line(entry: dict[str, Any]) -> str:
    """A row of the short table."""
    warm = entry["warm_ttft_s"]
    order = "" if entry["order"] == "shuffled" else f", {entry['order']} order"
    cells = (
        f"`{entry['arm']}`{order}",
        f"{100 * entry['token_hit_rate']:.1f} %",
        f"{milliseconds(warm['p50'])} ({milliseconds(warm['p25'])} to {milliseconds(warm['p75'])})",
        milliseconds(entry["bound_s"]),
        times(entry["speedup"]),
        f"{entry['bound_speedup']:.3g} ×",
    )
    return "| " + " | ".join(cells) + " |\n"


def line(entry: dict[str, Any]) -> str:
    """A row of the table."""
    warm, cold = entry["warm_ttft_s"], entry["cold_ttft_s"]
    cells = (
        entry["size"],
        f"`{entry['arm']}`",
        entry["order"],
        f"{entry['prompt_tokens']:,.0f}",
        f"{100 * entry['token_hit_rate']:.1f} %",
        milliseconds(cold["p50"]) if cold else "",
        milliseconds(warm["p50"]),
        f"{milliseconds(warm['p25'])} to {milliseconds(warm['p75'])}",
        milliseconds(entry["bound_s"]),
        f"{100 * entry['of_bound']:.0f} %",
        times(entry["speedup"]),
        f"{entry['bound_speedup']:.3g} ×",
    )
    return "| " + " | ".join(cells) + " |"


def times(speedup: dict[str, Any] | None) -> str:
    """The median speedup; a noisy machine has none."""
    return f"{speedup['p50']:.3g} ×" if speedup else "–"


def noise(summary: dict[str, Any]) -> str:
    """Why there are no speedups; empty on a calm machine."""
    return "".join(f"\n**{sentence}**.\n" for sentence in summary["caveats"])


def milliseconds(seconds: float) -> str:
    """Three digits: 4.20 ms."""
    value = 1e3 * seconds
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


if __name__ == "__main__":
    main()
