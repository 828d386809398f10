"""What other simulators of a prefix cache cost and find beside ours, in turns on one machine.

    .venvs/sim/bin/python benchmarks/peers/simulators.py --mooncake conversation_trace.jsonl --ragpulse FOLDER

Every run is a process of its own. Its processor seconds include its start and its children. Runs are kept in
`outputs/peers/simulators`: the same command goes on where it ended, at the same commit and on the same machine. At the
end it writes `simulators.json` and the tables of `simulators.md` beside this file. The generated requests are measured
without further arguments; `--workloads`, `--systems` and `--turns` choose what runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from measurements import clean_commit, facts, write_results
from pages import ROOT, fill_page, table

from spanlab.compiled import VARIABLE, ensure_build

OUT = ROOT / "outputs" / "peers" / "simulators"
GIB_OF_TOKENS = 1 / 8192  # llama-3.1-8b in bfloat16: 128 KiB of KV a token
TRACE_BLOCK = 512
SPANLAB = str(Path(sys.executable).with_name("spanlab"))
SETTINGS = """
    -cn explain analyses=[summary] only=[vllm_0_32] output.figures=false tracking=none workers=1
    hardware.memory_gib=1024 batch.max_num_seqs=256 batch.max_num_batched_tokens=8192 output.if_exists=replace
"""
MISSING = "–"
ORDER = ("conversation", "apart", "ragpulse")  # of the tables; generated requests come last


# ------------------------------------------------------------------------------
# Systems.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One row of a table: a simulator, its block size (None: that of the trace), and what it computes."""

    title: str
    kind: str
    block: int | None
    computes: str
    compiled: str = "never"


HITS = "hit rate only, one prompt after another"
STEPS = "schedule step by step, delays"
MORE = "schedule step by step, delays, records and causes of every request, bounds, intervals"
SYSTEMS = {
    "mocker_16": System("mocker", "mocker", 16, STEPS),
    "mocker_512": System("mocker", "mocker", 512, STEPS),
    "compiled_16": System("spanlab, compiled", "spanlab", 16, MORE, "always"),
    "compiled_512": System("spanlab, compiled", "spanlab", 512, MORE, "always"),
    "pure_16": System("spanlab, pure", "spanlab", 16, MORE),
    "pure_512": System("spanlab, pure", "spanlab", 512, MORE),
    "kvcache_simulator": System("kvcache-simulator", "kvcache_simulator", None, HITS),
    "kvlint_16": System("kvlint", "kvlint", 16, HITS),
    "kvlint_512": System("kvlint", "kvlint", 512, HITS),
}


# ------------------------------------------------------------------------------
# Workloads.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """A trace in Mooncake's format, its block size, the tokens of the pool that serves it, and turns to measure."""

    title: str
    path: Path
    trace_block: int
    pool_tokens: int
    turns: int = 1


def generated(requests: int, seed: int = 0, documents: int = 10_000) -> Iterator[dict[str, Any]]:
    """Yield requests about documents: popularity falls as 1 / rank (Zipf), and every question is new.

    A document has 1 to 12 blocks. A request arrives every 125 ms, its question has at most 512 tokens, and its answer
    8 to 24.
    """
    drawn = random.Random(seed)
    sizes = [drawn.randint(1, 12) for _ in range(documents)]
    firsts = [0, *accumulate(sizes)]
    weights = [*accumulate(1 / (rank + 1) for rank in range(documents))]
    for number in range(requests):
        [document] = drawn.choices(range(documents), cum_weights=weights)
        blocks = range(firsts[document], firsts[document + 1])
        yield {
            "timestamp": 125 * number,
            "input_length": TRACE_BLOCK * len(blocks) + drawn.randint(16, TRACE_BLOCK),
            "output_length": drawn.randint(8, 24),
            "hash_ids": [*blocks, firsts[-1] + number],
        }


def apart(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the requests of a trace ten minutes apart, so that no two run at once."""
    for number, line in enumerate(lines):
        yield json.loads(line) | {"timestamp": number * 600_000}


def written(name: str, rows: Iterable[dict[str, Any]]) -> Path:
    """Return a trace file with these rows, which is written if it is missing."""
    path = OUT / "traces" / f"{name}.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        with part.open("w") as lines:
            lines.writelines(f"{json.dumps(row)}\n" for row in rows)
        part.rename(path)
    return path


def ragpulse(folder: Path) -> Path:
    """Return RAGPulse as a Mooncake trace with blocks of 16 tokens; only we read its own form."""
    path = OUT / "traces" / "ragpulse.jsonl"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.jsonl")
        words = ("workload=log", f"workload.path={folder.resolve()}", "arrivals=as_given", "writer.format=mooncake")
        words += (f"writer.path={part}", "writer.block_size=16")
        subprocess.run([SPANLAB, "-cn", "export", *words], check=True)
        part.rename(path)
    return path


def workloads(given: argparse.Namespace) -> dict[str, Workload]:
    """Return the workloads whose data the command line names, and the generated one."""
    found = {}
    if given.mooncake is not None:
        pool = 10_000 * 512
        found["conversation"] = Workload("Mooncake conversation", given.mooncake.resolve(), TRACE_BLOCK, pool, 3)
        with given.mooncake.open() as lines:
            path = written("apart", apart(lines))
        found["apart"] = Workload("Mooncake conversation, requests ten minutes apart", path, TRACE_BLOCK, pool)
    if given.ragpulse is not None:
        found["ragpulse"] = Workload("RAGPulse", ragpulse(given.ragpulse), 16, 100 * 512)
    name = f"generated_{given.requests}"
    path = written(name, generated(given.requests))
    found[name] = Workload(f"{given.requests:,} generated requests", path, TRACE_BLOCK, 10_000 * 512)
    return {name: found[name] for name in given.workloads or found if name in found}


# ------------------------------------------------------------------------------
# Runs.
# ------------------------------------------------------------------------------


def packages() -> Path:
    """Return the folder of the foreign simulators; what is missing of them and of our compiled core is made."""
    folder, pins = OUT / "packages", HERE / "simulators.txt"
    if not (folder / "kvlint").is_dir():
        install = f'"$uv" --quiet pip install --no-deps --require-hashes --target "{folder}" --requirements "{pins}"'
        script = f'source "{ROOT}/requirements/setup.sh"; find_python; find_uv; {install} --python "{sys.executable}"'
        subprocess.run(["bash", "-c", script], check=True)
    worker = [sys.executable, str(HERE / "simulators_worker.py"), "prepare"]
    subprocess.run(worker, check=True, env=os.environ | {"PYTHONPATH": str(folder)})
    ensure_build()
    return folder


def measured(command: list[str], environment: dict[str, str]) -> tuple[dict[str, float], str]:
    """Run a command, and return what it took, children included, and what it printed."""
    load, began = os.getloadavg()[0], time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    peaks, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            peaks.append(resident_bytes(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: expected exit status 0, got {process.returncode}")
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.perf_counter() - began,
        "mib": max(max(peaks) / 2**20, usage.ru_maxrss / 2**10),
        "load": load,
    }, printed


def resident_bytes(session: int) -> int:
    """Return the resident bytes of all processes of a session; shared pages count once per process."""
    pages = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            pages += int(fields[21]) if int(fields[3]) == session else 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(name: str, workload: Workload, foreign: Path) -> dict[str, Any]:
    """Run a system on a workload, and return its row."""
    system = SYSTEMS[name]
    block = system.block or workload.trace_block
    if system.kind != "spanlab":
        numbers = (workload.trace_block, block, workload.pool_tokens // block)
        worker = [sys.executable, str(HERE / "simulators_worker.py"), system.kind, str(workload.path)]
        took, printed = measured([*worker, *map(str, numbers)], os.environ | {"PYTHONPATH": str(foreign)})
        return took | json.loads(printed)
    folder = OUT / "runs"
    command = [SPANLAB, *SETTINGS.split(), f"log={workload.path}", f"compiled={system.compiled}"]
    # one block more: vLLM's null block, which the mocker does not count
    command += [f"store.total_gib={(workload.pool_tokens + block) * GIB_OF_TOKENS}", f"output.root={folder}"]
    command += [f"arms.vllm_0_32.pool.block_size={block}", f"output.run={name}"]
    took, _ = measured(command, os.environ | {VARIABLE: system.compiled})  # set beforehand, it needs no restart
    return took | counts_of(folder / "log" / name)


def counts_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Return reused and all prompt tokens of our run, of all requests and of the last half in order of arrival."""
    with (folder / "tables" / "arms.csv").open() as lines:
        [row] = csv.DictReader(lines)
    with (folder / "records" / "vllm_0_32.jsonl").open() as lines:
        records = sorted(
            (record["arrived_s"], record["request_id"], record["reused_tokens"], record["prompt_tokens"])
            for record in map(json.loads, lines)
        )
    half = records[len(records) // 2 :]
    assert sum(record[3] for record in records) == int(row["prompt_tokens"])
    return {
        "all": (int(row["reused_tokens"]), int(row["prompt_tokens"])),
        "half": (sum(record[2] for record in half), sum(record[3] for record in half)),
    }


class Kept:
    """Runs of this commit and machine, kept in a file after each."""

    def __init__(self) -> None:
        self._file, self._now = OUT / "rows.json", {key: facts()[key] for key in ("commit", "machine")}
        stored = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.rows: dict[str, dict[str, list[dict[str, Any]]]] = stored.get("rows", {})
        if stored and stored["now"] != self._now:
            print("the kept runs are of another commit or machine, and are measured again")
            self.rows = {}

    def add(self, workload: str, system: str, row: dict[str, Any]) -> None:
        """Keep one more run."""
        self.rows.setdefault(workload, {}).setdefault(system, []).append(row)
        write_results(self._file, {"now": self._now, "rows": self.rows})


# ------------------------------------------------------------------------------
# Page.
# ------------------------------------------------------------------------------

Rows = dict[str, list[dict[str, Any]]]
HEAD = ("simulator", "block", "turns", "CPU s: median [least, most]", "÷ mocker", "wall s", "peak MiB", "reused")
HEAD = (*HEAD, "reused, last half")


def share(counts: list[int] | None) -> str:
    """Return a share of tokens in percent."""
    return MISSING if counts is None else f"{100 * counts[0] / counts[1]:.2f} %"


def spread(values: list[float]) -> str:
    """Return the median, and the least and the most of several values."""
    ends = f" [{min(values):.1f}, {max(values):.1f}]" if len(values) > 1 else ""
    return f"{median(values):.1f}{ends}"


def ratios(rows: Rows, name: str) -> list[float]:
    """Return processor seconds ÷ those of the mocker with the same blocks in the same turn."""
    mocker = f"mocker_{SYSTEMS[name].block}"
    pairs = zip(rows[name], rows.get(mocker, []), strict=False)
    return [own["cpu_s"] / other["cpu_s"] for own, other in pairs if name != mocker]


def lines_of(title: str, rows: Rows) -> str:
    """Return the table of a workload and its sentences of agreement."""
    cells = []
    for name, system in SYSTEMS.items():
        if runs := rows.get(name):
            seconds, each = [row["cpu_s"] for row in runs], ratios(rows, name)
            cells.append(
                (
                    system.title,
                    system.block or "trace's",
                    len(runs),
                    spread(seconds),
                    f"{median(each):.1f} ×" if each else MISSING,
                    f"{median(row['wall_s'] for row in runs):.0f}",
                    f"{max(row['mib'] for row in runs):,.0f}",
                    share(runs[-1]["all"]),
                    share(runs[-1]["half"]),
                )
            )
    loads = [row["load"] for runs in rows.values() for row in runs]
    note = f"Load average of the machine before a run: {min(loads):.1f} to {max(loads):.1f}."
    return "\n".join((f"**{title}**", "", table(HEAD, cells), *agreements(rows), f"\n{note}", ""))


def agreements(rows: Rows) -> Iterator[str]:
    """Yield a sentence for each block size: whether the mocker and we reuse the same tokens."""
    for block in (16, 512):
        mocker, ours = rows.get(f"mocker_{block}"), rows.get(f"compiled_{block}") or rows.get(f"pure_{block}")
        if mocker and ours:
            yield agreement(block, mocker[-1]["all"], ours[-1]["all"])


def agreement(block: int, mocker: list[int], ours: list[int]) -> str:
    """Return whether the reuse of the mocker and ours agree, in one sentence."""
    (theirs, all_theirs), (own, all_own) = mocker, ours
    if all_theirs != all_own:
        return f"- Blocks of {block}: the prompts differ, {all_theirs:,} tokens in the mocker and {all_own:,} here."
    if theirs == own:
        return f"- Blocks of {block}: the mocker and spanlab reuse the same {own:,} of {all_own:,} tokens."
    points = 100 * abs(own - theirs) / all_own
    return (
        f"- Blocks of {block}: the mocker reuses {theirs:,} tokens, spanlab {own:,}: "
        f"{points:.2g} points {'more' if own > theirs else 'fewer'} of {all_own:,}."
    )


def publish(results: dict[str, Any]) -> None:
    """Write the tables of the page."""
    computed = table(
        ("simulator", "what it computes"),
        {system.title: (system.title, system.computes) for system in SYSTEMS.values()}.values(),
    )
    parts = [lines_of(title, results["rows"][name]) for name, title in results["titles"].items()]
    note = f"{results['machine']}; commit {results['commit']}."
    fill_page(HERE / "simulators.md", "simulators", "\n".join((computed, *parts, f"{note}\n")))


def main() -> None:
    """Measure what is missing, and publish it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--ragpulse", type=Path, help="the folder of the RAGPulse trace")
    parser.add_argument("--requests", type=int, default=1_000_000, help="generated requests")
    parser.add_argument("--workloads", nargs="+", help="conversation, apart, ragpulse, generated_REQUESTS")
    parser.add_argument("--systems", nargs="+", choices=tuple(SYSTEMS), default=tuple(SYSTEMS))
    parser.add_argument("--turns", type=int, default=3, help="most turns of a workload")
    parser.add_argument("--tables", action="store_true", help="measure nothing, and write the tables again")
    given = parser.parse_args()
    if given.tables:
        publish(json.loads((HERE / "simulators.json").read_text()))
        return
    commit, foreign, kept = clean_commit(), packages(), Kept()
    found = workloads(given)
    for name, workload in found.items():
        for turn in range(min(workload.turns, given.turns)):
            for system in given.systems:
                if len(kept.rows.get(name, {}).get(system, [])) <= turn:
                    kept.add(name, system, row := run(system, workload, foreign))
                    print(f"{name} {system}: {row}", flush=True)
    titles = json.loads((OUT / "titles.json").read_text()) if (OUT / "titles.json").is_file() else {}
    titles |= {name: workload.title for name, workload in found.items()}
    shown = sorted(kept.rows.keys() & titles.keys(), key=lambda name: [*ORDER, name].index(name))
    titles = {name: titles[name] for name in shown}
    write_results(OUT / "titles.json", titles)
    results = {"commit": commit, "machine": facts()["machine"], "titles": titles, "rows": kept.rows}
    write_results(HERE / "simulators.json", results)
    publish(results)


if __name__ == "__main__":
    main()
