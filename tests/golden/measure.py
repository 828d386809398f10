"""Golden set of results: what a restructuring of the code must leave equal, written into one folder.

`python tests/golden/measure.py FOLDER [--only NAME ...]` runs the program of this Python environment. The script
knows commands and files, no module of the code, so that it also runs before and after modules are moved.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Entries of `summary.json` that a second run may change: the machine, the moment and the state of the checkout.
VOLATILE = ("commit", "machine", "versions", "wall_s", "compiled", "overhead", "device", "provenance")
FEW = ("workload.documents=12", "workload.questions_per_document=4")
QUIET = ("tracking=none", "output.figures=false", "output.run=golden")
TALKS = ("workload.chat_sessions.sessions=40",)
LOG = ("log={log}",)
#: Overrides of each study by name; a name is an entry.
STUDIES: dict[str, tuple[str, ...]] = {
    "smoke": (),
    "quality_sim": (*FEW, "seeds=[0]"),
    "narrativeqa_sim": ("workload.documents=6", "workload.questions_per_document=3", "seeds=[0]"),
    "system_prompts_sim": ("workload.documents=12", "workload.questions_per_document=4", "seeds=[0]"),
    "pic_sim": ("workload.rag.requests=60", "seeds=[0, 1]"),
    "families_sim": (*FEW, "sweep=[]", "seeds=[0]"),
    "tiers_sim": (*FEW, 'sweep=["store.tiers.host.bandwidth_gb_s=4,64"]'),
    "replicas_sim": (*TALKS, "seeds=[0]", 'sweep=["replicas.routing=round_robin,prefix_aware"]'),
    "sessions_sim": (*TALKS, "seeds=[0, 1]"),
    "state_ratio_sim": (*FEW, "seeds=[0]", 'sweep=["store.state_ratio=0.2,1.4"]'),
    "eviction_sim": (*FEW, "seeds=[0]", "sweep=[]"),
    "hybrid_policies_sim": (*FEW, "seeds=[0]", "sweep=[]"),
    "break_even_sim": ("workload.rag.requests=60", "seeds=[0]", "sweep=[]"),
    "chat_sim": ("seeds=[0]", "sweep=[]", "workload.repeated_documents.trials=2"),
    "mixed_sim": ("seeds=[0]", "sweep=[]", "only=[none,radix,exact_hash]", *FEW),
    "sparse_prefix_replica": ("workload.path={parquet}", "seeds=[0]"),
    "explain": LOG,
    "plan": (*LOG, "slo.ttft_p95_s=2.0", "plan.search=[memory,load]", "seeds=[0, 1]", "plan.points=3"),
    "twin": ("log={served}", "model=llama-3.1-8b", "hardware=rtx4090"),
}
#: Minutes between arrivals, which the virtual clock skips: batches of one request do not depend on measured times.
ONE_CLIENT = ("arrivals.rate_rps=0.001",)
#: Studies on the engine, which need the environment with torch: one thread, so that sums have one order.
ENGINE: dict[str, tuple[str, ...]] = {
    "quality_clean": (
        *("workload.documents=2", "workload.questions_per_document=2", "workload.max_prompt_tokens=256"),
        *("only=[none,boundary]", *ONE_CLIENT, "engine.threads=1", "analyses=[summary]"),
    ),
    "pic_clean": (
        *("workload.rag.requests=4", "workload.rag.passage_tokens=64", "only=[none,pic]", "engine.threads=1"),
        *(*ONE_CLIENT, "analyses=[summary]"),
    ),
}
#: Ends of names that hold measured times of the engine.
MEASURED = ("_ns", "_s", "_ms", "_clock", "share", "device", "speedup", "load", "_mean_bytes", "records_end")
EXPORTS = ("mooncake", "guidellm", "openai")
#: Commands with a mistake, run with --dry; their sentences are part of the set.
REFUSALS = (
    *("-cn smok", "-cn smoke sedes=[1]", "-cn smoke seeds=[0,0]", "-cn smoke seeds=[x]", "-cn smoke workers=0"),
    *("-cn smoke store.total_gib=-1", "-cn smoke store=gib_5", "-cn smoke arms=nope", "-cn smoke only=[nope]"),
    *("-cn smoke arms.nope.keep=true", "-cn smoke arms.none.keep=1", "-cn smoke arms.none.block_size=0"),
    *("-cn smoke arms.none.eviction=lruu", "-cn smoke arms.none.eviction=gdsf", "-cn smoke arms.none.cost=joule"),
    *("-cn smoke arms.none.eviction_options.x=1", "-cn smoke arms.none.admission=min_length"),
    *("-cn smoke arms.none.placement.kind=blok", "-cn smoke arms.none.placement.interval=3"),
    *("-cn smoke arms.none.recovery=tail_replay", "-cn smoke arms.none.policy=chunk"),
    *("-cn smoke arms.none.pool.block_size=8", "-cn smoke arms.none.match=radixx", "-cn smoke +arms.x={}"),
    *("-cn smoke arrivals.rate_rps=0", "-cn smoke arrivals.burstiness=2", "-cn smoke arrivals=closed_loop"),
    *("-cn smoke arrivals.kind=poison", "-cn smoke timing=constant", "-cn smoke timing.profile=x"),
    *("-cn smoke replicas.count=2", "-cn smoke replicas.routing=weighted replicas.cache_weight=-1"),
    *("-cn smoke workload.kind=qualitty", "-cn smoke workload.rag.requests=5", "-cn smoke workload.documents=0"),
    *("-cn smoke workload.source=web", "-cn rag_sim workload.rag.k=0", "-cn smoke workload=rag workload.rag.foo=1"),
    *(
        "-cn smoke model=nope",
        "-cn smoke model.kv_heads=3",
        "-cn smoke hardware=H100",
        "-cn smoke batch.max_num_seqs=0",
    ),
    *("-cn smoke analyses=[sumary]", "-cn smoke analyses=[]", "-cn smoke plan.points=1", "-cn smoke slo.ttft_p95_s=1"),
    *(
        "-cn plan",
        "-cn plan slo.ttft_p95_s=1 plan.search=[mem]",
        "-cn explain fail_on=token_hit_rate",
        "-cn explain log=no",
    ),
    *("-cn twin", "-cn smoke log=no", "-cn smoke backend=gpu", "-cn smoke backend=server", "-cn replay"),
    *(
        "-cn smoke base_url=http://x",
        "-cn smoke load.rates_rps=[1,1]",
        "-cn smoke sweep=[seeds]",
        "-cn smoke repeats=2",
    ),
    *(
        "-cn smoke executor=dask",
        "-cn smoke executor.kind=cloud",
        "-cn smoke compiled=perhaps",
        "-cn smoke plugins=[no.py]",
    ),
    *("-cn smoke output.run=.x", "-cn smoke tracking.kind=mlflow", "-cn smoke baseline=nope", "-cn smoke a b=1"),
)


def main() -> None:
    """Write the chosen parts of the golden set; a part that fails ends the program with its message."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="names of parts; all parts by default")
    parser.add_argument("--engine", action="store_true", help="also the studies on the engine, which need torch")
    chosen = parser.parse_args()
    parts = dict.fromkeys(STUDIES, _study) | {f"export_{name}": _export for name in EXPORTS}
    parts |= {"configs": _configs, "messages": _messages, "refusals": _refusals, "help": _help}
    if chosen.engine or set(chosen.only) & {*ENGINE, "conformance"}:
        parts |= dict.fromkeys(ENGINE, _engine) | {"conformance": _conformance}
    unknown = set(chosen.only) - set(parts)
    if unknown:
        raise SystemExit(f"--only={sorted(unknown)}: expected some of {', '.join(parts)}")
    with tempfile.TemporaryDirectory() as scratch:
        inputs = _inputs(Path(scratch))
        for name, measure in parts.items():
            if chosen.only and name not in chosen.only:
                continue
            target = chosen.folder / name
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            measure(name, target, inputs)
            print(f"{name}: {sum(1 for path in target.rglob('*') if path.is_file())} files", flush=True)


def spanlab(*arguments: str, accept: tuple[int, ...] = (0,)) -> str:
    """Run the program of this environment in the root, and return its output."""
    command = [str(Path(sys.executable).parent / "spanlab"), *arguments]
    environment = os.environ | {"SPANLAB_ENVIRONMENT": Path(sys.prefix).name, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in accept:
        raise SystemExit(
            f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def _inputs(scratch: Path) -> dict[str, str]:
    """Write a log and a table of token ids, and return their paths by name."""
    log = scratch / "requests.jsonl"
    blocks = [[document * 100 + block for block in range(12)] for document in range(5)]
    with log.open("w") as lines:
        for number in range(120):
            hashes = blocks[number % 5][: 4 + number % 9]
            hashes.append(10_000 + number)
            row = {
                "timestamp": 150 * number,
                "input_length": 512 * len(hashes) - number % 7,
                "output_length": 20 + number % 50,
                "hash_ids": hashes,
            }
            lines.write(json.dumps(row) + "\n")
    table = scratch / "prompts.parquet"
    code = (
        "import sys, pyarrow as pa; from pyarrow import parquet\n"
        "rows = [[1000 * group + i for i in range(300)] + [7, row] for row in range(6) for group in (1, 2)]\n"
        "columns = {'group_id': [group for _ in range(6) for group in (1, 2)], "
        "'idx': [row for row in range(6) for _ in (1, 2)], 'tokens': rows, 'n_tokens': [len(row) for row in rows]}\n"
        "parquet.write_table(pa.table(columns), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(table)], check=True)
    served = scratch / "served"
    served.mkdir()
    with (served / "requests.jsonl").open("w") as lines:
        free = 0.0
        for number in range(120):
            prompt, output, arrived = 100 + 37 * (number * 7 % 53), 10 + number % 20, 0.3 * number
            first = max(free, arrived) + 0.01 + prompt / 9000
            free = first + 0.009 * output
            row = {
                "request_id": f"r{number}",
                "input_toks": prompt,
                "output_toks": output,
                "arrival_time": 1.7e9 + arrived,
                "queued_ts": 5000.0 + arrived,
                "first_token_ts": 5000.0 + first,
                "last_token_ts": 5000.0 + free,
            }
            lines.write(json.dumps(row) + "\n")
    engine = {"max_num_batched_tokens": 1024, "max_num_seqs": 16}
    settings = {"engine_kwargs": engine, "kv_cache": {"num_gpu_blocks": 2501, "block_size": 16}}
    (served / "meta.json").write_text(json.dumps(settings))
    return {"log": str(log), "parquet": str(table), "served": str(served)}


def _study(name: str, target: Path, inputs: dict[str, str], settings: tuple[str, ...] | None = None) -> None:
    """Run a study, and keep its records, runs, tables and summary."""
    overrides = [override.format_map(_Inputs(inputs)) for override in settings or STUDIES[name]]
    with tempfile.TemporaryDirectory() as root:
        spanlab("-cn", name, *QUIET, f"output.root={root}", *overrides)
        for summary in sorted(Path(root).rglob("summary.json")):
            folder = summary.parent
            _keep(folder, target / folder.name, inputs | {"root": root})


class _Inputs(dict[str, str]):
    """Names in braces are replaced where they are inputs; other braces belong to the override."""

    def __missing__(self, key: str) -> str:
        return "{" + key + "}"


def _keep(folder: Path, target: Path, inputs: dict[str, str]) -> None:
    target.mkdir(parents=True)
    for pattern in ("records/*.jsonl", "runs/*.jsonl", "tables/*.csv", "*.jsonl", "trace/*.jsonl", "steps/*.jsonl"):
        for path in sorted(folder.glob(pattern)):
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_without_paths(path.read_text(), inputs))
    summary = _steady(json.loads((folder / "summary.json").read_text()))
    (target / "summary.json").write_text(_without_paths(json.dumps(summary, indent=1), inputs) + "\n")


def _steady(value: object) -> object:
    """Return a summary without volatile entries, on every level."""
    if isinstance(value, dict):
        return {key: _steady(entry) for key, entry in value.items() if key not in VOLATILE}
    return [_steady(entry) for entry in value] if isinstance(value, list) else value


def _without_paths(text: str, inputs: dict[str, str]) -> str:
    for key, path in inputs.items():
        text = text.replace(path, f"<{key}>")
    return text


def _engine(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Run a study on the engine; numbers that are measured times are left out."""
    with tempfile.TemporaryDirectory() as scratch:
        _study(name, Path(scratch, "all"), inputs, ENGINE[name])
        for path in sorted(Path(scratch).rglob("*.jsonl")):
            if path.name == "readings.jsonl":  # the clock of the machine
                continue
            copy = target / path.relative_to(scratch)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("w") as lines:
                for line in path.read_text().splitlines():
                    lines.write(json.dumps(_without_times(json.loads(line))) + "\n")


def _conformance(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Check the built-in model, and keep the verdicts."""
    with tempfile.TemporaryDirectory() as root:
        spanlab("-cn", name, "prompts=2", "output.run=golden", f"output.root={root}")
        (table,) = Path(root).rglob("properties.csv")
        shutil.copy(table, target)


def _without_times(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: _without_times(entry)
            for key, entry in value.items()
            if not key.endswith(MEASURED) and key not in VOLATILE
        }
    return [_without_times(entry) for entry in value] if isinstance(value, list) else value


def _export(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Write a workload in one format of other programs."""
    writer = name.removeprefix("export_")
    options = {"openai": ("vocab_size=151936",), "guidellm": ("writer.block_size=16",)}.get(writer, ())
    spanlab("-cn", "export", f"writer.format={writer}", f"writer.path={target / 'workload.jsonl'}", *options, *FEW)


def _configs(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Write the resolved settings of every entry."""
    needed = {"plan": ["slo.ttft_p95_s=0.5"], "replay": ["base_url=http://server"]}
    for entry in (line.split()[0] for line in spanlab("--list", "entries").splitlines()):
        text = spanlab("-cn", entry, *needed.get(entry, []), "--cfg", "job", "--resolve", accept=(0, 1))
        (target / f"{entry}.yaml").write_text(text)


def _help(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Write the text of --help, and names from --list."""
    (target / "help.txt").write_text(spanlab("--help"))
    for key in ("entries", "analyses", "arms.NAME.policy", "arms.NAME.eviction", "workload.kind", "arrivals.kind"):
        (target / f"{key}.txt").write_text(spanlab("--list", key))


#: Runs the console script once per command of standard input, in one process.
_REFUSED = """
import contextlib, io, json, pathlib, runpy, sys
from hydra.core.global_hydra import GlobalHydra
main, rows = runpy.run_path(str(pathlib.Path(sys.executable).parent / "spanlab"))["main"], {}
for command in json.load(sys.stdin):
    sys.argv, code, errors = ["spanlab", *command.split(), "--dry"], 0, io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
    GlobalHydra.instance().clear()
    rows[command] = [code, *errors.getvalue().splitlines()[-1:]]
print(json.dumps(rows, indent=1, ensure_ascii=False))
"""


def _refusals(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Keep the exit code and the sentence of each command of `REFUSALS`."""
    environment = os.environ | {"SPANLAB_ENVIRONMENT": Path(sys.prefix).name, "COLUMNS": "200"}
    command = [sys.executable, "-c", _REFUSED]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=json.dumps(REFUSALS), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    (target / "sentences.json").write_text(done.stdout.replace(str(ROOT), "<root>"))


def _messages(name: str, target: Path, inputs: dict[str, str]) -> None:
    """Write every text of an error that the code raises, with its count; placeholders of f-strings are `{}`."""
    counts: Counter[str] = Counter()
    for folder in ("src", "sim", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    counts.update(text for argument in node.exc.args if (text := _literal(argument)))
    lines = [f"{count} {text!r}" for text, count in sorted(counts.items())]
    (target / "messages.txt").write_text("\n".join(lines) + "\n")


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


if __name__ == "__main__":
    main()
