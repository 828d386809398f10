"""Decisions of a running vLLM beside ours, over models, workloads, clients, block sizes, tight memory and drafts.

    .venvs/answers/bin/python benchmarks/rendezvous/measure.py [SERVER ...]

The environment `answers` has the weights of SmolLM2; other servers are measured in `.venvs/sim` as well. Each of
`SERVERS` is started once, as `server.engine=vllm_cpu` starts it, and serves every workload with one client and
with four or eight, its cache emptied before each run. Runs are studies of the entry `rendezvous`; their folders are in
`outputs/rendezvous`. Writes `results.json` and the page beside it; names of servers measure these again and keep the
others. `publish.py rendezvous` tells the front page.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import hydra
from measurements import clean_commit, write_results
from pages import ROOT, fill_page, table

from spanlab import api
from spanlab.cli import register
from spanlab.compiled import CONF
from spanlab.settings.composition import as_settings, compose_entry
from spanlab.settings.study import Study
from spanlab.study.servers.base import Launch, free_port, running

OUT = ROOT / "outputs" / "rendezvous"
LONGEST = 2048  # tokens of a request, its output included
BLOCK = "arms.vllm_0_32.pool.block_size"
HYBRID = "model=tiny-hybrid-experts"
SMOLLM2 = ["model=smollm2-135m", "model.weight_itemsize=4", "model.kv_itemsize=4", "engine.weights=package"]
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}'
#: Settings of the servers, by name.
SERVERS = {
    "transformer, blocks of 32": [f"{BLOCK}=32"],
    "transformer, blocks of 128": [f"{BLOCK}=128"],
    "transformer, tight memory": [f"{BLOCK}=32", "store.kv_gib=0.00404"],  # 66 blocks
    "transformer, 16 at once": [f"{BLOCK}=32", "store.kv_gib=0.00404", "batch.max_num_seqs=16"],
    "transformer, chunks of 128": [f"{BLOCK}=32", "batch.max_num_batched_tokens=128"],
    "transformer, n-gram drafts": [f"{BLOCK}=32", f"server.arguments=['--speculative-config','{NGRAM}']"],
    "hybrid, blocks of the server": [HYBRID, f"{BLOCK}=null"],
    "hybrid, blocks of 384": [HYBRID, f"{BLOCK}=384"],
    "SmolLM2-135M, blocks of 32": [*SMOLLM2, f"{BLOCK}=32"],
    "windows as in Gemma 3": ["model=tiny-gemma3", f"{BLOCK}=32"],
    "windows as in Gemma 3, tight memory": [
        "model=tiny-gemma3",
        f"{BLOCK}=32",
        "batch.max_num_batched_tokens=256",  # else the windows of one long prompt fill a small pool
        "store.kv_gib=0.002",  # 131 blocks
    ],
    "windows as in gpt-oss": ["model=tiny-gpt-oss", f"{BLOCK}=32"],
}
#: Workloads by name: prompts of some hundred tokens, outputs of 8 to 48.
WORKLOADS = {
    "documents": [
        "workload=repeated_documents",
        "workload.output_tokens=8",
        "workload.repeated_documents.documents=3",
        "workload.repeated_documents.document_tokens=200",
    ],
    "chat": [
        "workload=chat_sessions",
        "workload.chat_sessions.sessions=8",
        "workload.chat_sessions.turns=4",
        "workload.chat_sessions.system_tokens=256",
        "workload.chat_sessions.message_tokens=64",
        "workload.chat_sessions.answer_tokens=24",
        "workload.chat_sessions.think_s=0",
    ],
    "bursts": [
        "workload=synthetic",
        "workload.output_tokens=48",
        "workload.synthetic.groups=6",
        "workload.synthetic.requests_per_group=6",
        "workload.synthetic.prompt_tokens=500",
    ],
    "agents": [
        "workload=chat_sessions",
        "workload.chat_sessions.sessions=5",
        "workload.chat_sessions.turns=6",
        "workload.chat_sessions.tenants=2",
        "workload.chat_sessions.system_tokens=384",
        "workload.chat_sessions.message_tokens=96",
        "workload.chat_sessions.answer_tokens=12",
        "workload.chat_sessions.think_s=0.05",
        "workload.chat_sessions.seed=1",
    ],
}
#: Numbers of clients; other servers: 1, 4.
CLIENTS = {
    "transformer, tight memory": (1, 8),
    "transformer, 16 at once": (8, 16),
    "windows as in Gemma 3, tight memory": (1, 8),
}
COUNTS = ("requests", "same_reuse", "same_course", "steps", "equal_steps", "preemptions")


def settings_of(overrides: list[str]) -> Study:
    """Return the study of the entry with overrides."""
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        study = as_settings(compose_entry("rendezvous", overrides))
    assert isinstance(study, Study), "the entry is a study"
    return study


def measure(name: str) -> dict[str, dict[str, int]]:
    """Start one server, run every workload, and return the counts by workload and clients."""
    folder = OUT / name.replace(",", "").replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    settings = SERVERS[name]
    started = settings_of(settings)
    rows: dict[str, dict[str, int]] = {}
    with running(Launch(started, folder, free_port(None), LONGEST)) as server:
        own = [word for word in settings if not word.startswith("server.")]
        there = [
            "server.engine=none",
            f"base_url={server.base_url}",
            f"server.step_log={server.launch.steps}",
            "server.reset_path=/reset_prefix_cache",
        ]
        for (workload, words), clients in product(WORKLOADS.items(), CLIENTS.get(name, (1, 4))):
            run = f"output.run={folder.name}-{workload}-{clients}"
            done = api.run("rendezvous", *own, *there, *words, f"arrivals.clients={clients}", f"output.root={OUT}", run)
            row: Counter[str] = Counter()
            for found in done.details["rendezvous"]["runs"]:
                row.update({key: found[key] for key in COUNTS if key in found})
                row["equal_steps"] += found["steps"] - found["differing_steps"]
            rows[f"{workload}, {clients} client{'s' if clients > 1 else ''}"] = dict(row)
            print(name, workload, clients, dict(row), flush=True)
    return rows


def publish(results: dict[str, Any]) -> None:
    """Write the table into the page beside this file."""
    head = ("server", "workload", "requests", "equal reuse", "equal steps of requests", "steps", "equal", "preemptions")
    rows: list[tuple[str, ...]] = []
    total: Counter[str] = Counter()
    for server, by_workload in results["rows"].items():
        for workload, row in by_workload.items():
            total.update(row)
            rows.append((server, workload, *(f"{row[key]:,}" for key in COUNTS)))
    rows.append(("**all**", "", *(f"{total[key]:,}" for key in COUNTS)))
    commits = ", ".join(dict.fromkeys(results["commits"].values()))
    note = f"{results['system']}, running; commit {commits}; `benchmarks/rendezvous/measure.py`."
    fill_page(HERE / "README.md", "rendezvous", f"{table(head, rows)}\n{note}\n")


def main() -> None:
    """Measure the named servers, or all; keep the results of the others."""
    names, commit, path = sys.argv[1:] or list(SERVERS), clean_commit(), HERE / "results.json"
    earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}, "commits": {}}
    rows, commits = earlier["rows"], earlier["commits"]
    for name in names:
        rows[name], commits[name] = measure(name), commit
        known = [server for server in SERVERS if server in rows]
        results = {
            "system": "vLLM 0.32.0 for CPUs",
            "commits": {server: commits[server] for server in known},
            "rows": {server: rows[server] for server in known},
        }
        write_results(path, results)
        publish(results)


if __name__ == "__main__":
    main()
