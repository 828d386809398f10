"""Cached answers of a running vLLM beside its own uncached ones, property by property.

    .venvs/answers/bin/python benchmarks/rendezvous/answers.py [SERVER ...]

Each of `SERVERS` is started by the entry `conformance`, with a cache so small that it evicts and preempts. Writes
`answers.json` and the page beside it; names of servers measure these again and keep the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, write_results
from pages import ROOT, fill_page, table

from spanlab.cli import compose
from spanlab.study.conformance import run_conformance
from spanlab.study.folder import read_summary

OUT = ROOT / "outputs" / "rendezvous"
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}'
SMALL = ["server.engine=vllm_cpu", "output_tokens=4", "live.concurrency=8"]
SMOLLM2 = ["model=smollm2-135m", "model.weight_itemsize=4", "model.kv_itemsize=4", "engine.weights=package"]
#: Settings of the runs, by the name of the server in the table.
SERVERS = {
    "transformer": [
        *("prompts=4", "live.largest_prompt=600", "live.long_output=300", "live.fill_tokens=8192"),
        *(
            "live.chunk_tokens=128",
            "server.arguments=['--num-gpu-blocks-override','96','--max-num-batched-tokens','128']",
        ),
    ],
    "SmolLM2-135M, n-gram drafts": [
        *(*SMOLLM2, "prompts=3", "live.largest_prompt=600", "live.long_output=300", "live.fill_tokens=4000"),
        "live.chunk_tokens=128",
        "server.arguments=['--num-gpu-blocks-override','72','--max-num-batched-tokens','128',"
        f"'--speculative-config','{NGRAM}']",
    ],
    "hybrid, blocks of 384": [
        *("model=tiny-hybrid-experts", "prompts=3", "live.largest_prompt=1900", "live.long_output=600"),
        *("live.fill_tokens=20000", "live.chunk_tokens=400", "live.block_size=384"),
        "server.arguments=['--num-gpu-blocks-override','24','--max-num-batched-tokens','400','--block-size','384']",
    ],
}


def measure(name: str) -> dict[str, Any]:
    """Start one server, test its properties, and return them."""
    settings = compose("conformance", [*SMALL, *SERVERS[name], "output.if_exists=replace"])
    run = name.replace(",", "").replace(" ", "_")
    run_conformance(settings, run, OUT)
    properties: dict[str, Any] = read_summary(OUT / "conformance" / run, "properties")["properties"]
    return properties


def publish(results: dict[str, Any]) -> None:
    """Write the table into the page beside this file."""
    servers = results["properties"]
    names = list(dict.fromkeys(name for properties in servers.values() for name in properties))
    rows = [(f"`{name}`", *(_cell(properties[name]) for properties in servers.values())) for name in names]
    notes = [
        f"- {server}, `{name}`: {properties[name]['what']}."
        for server, properties in servers.items()
        for name in names
        if properties[name]["verdict"] != "passed"
    ]
    commits = ", ".join(dict.fromkeys(results["commits"].values()))
    note = f"vLLM 0.32.0 for CPUs, running; commit {commits}; `benchmarks/rendezvous/answers.py`."
    lines = "\n".join(notes)
    fill_page(HERE / "README.md", "live_answers", f"{table(('property', *servers), rows)}\n{lines}\n\n{note}\n")


def _cell(found: dict[str, Any]) -> str:
    if found["limit"] is None or found["measured"] is None:
        return str(found["verdict"])
    return f"{found['verdict']}: {found['measured']:.2g} of {found['limit']:.2g}"


def main() -> None:
    """Measure the named servers, or all; keep the results of the others."""
    names, commit, path = sys.argv[1:] or list(SERVERS), clean_commit(), HERE / "answers.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"properties": {}, "commits": {}}
    for name in names:
        earlier["properties"][name], earlier["commits"][name] = measure(name), commit
    results = {key: {name: earlier[key][name] for name in SERVERS if name in earlier[key]} for key in earlier}
    write_results(path, results)
    publish(results)


if __name__ == "__main__":
    main()
