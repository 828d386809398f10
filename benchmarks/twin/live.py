"""A twin fitted to one run of a running vLLM, and its predictions of other loads, cache sizes and workloads.

    .venvs/answers/bin/python benchmarks/twin/live.py [--runs | --fit] [SERVER ...]

Each of `SERVERS` is started once, as `server.engine=vllm_cpu` starts it, and serves `PROMPTS` open loop with Poisson
arrivals, its cache emptied before each run: first all requests at once, which is the saturation, then every load, most
of them twice, in turns. Runs are studies of the entry `rendezvous` in `outputs/twin_live`; a finished one is not run
again. Once all servers are measured, the entry `twin` fits one run of each model and predicts all others, and
`results.json` and the section of the page beside it are written. `--runs` ends before that; `--fit` does that alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measurements import clean_commit, facts, write_results
from pages import ROOT, fill_page, table

from spanlab import api
from spanlab.cli import compose
from spanlab.study.servers.base import Launch, RunningServer, free_port, running

OUT = ROOT / "outputs" / "twin_live"
LONGEST = 2048  # tokens of a request, its output included
MODELS = {
    "transformer": ["model=smollm2-135m", "model.weight_itemsize=4", "model.kv_itemsize=4", "engine.weights=package"],
    "hybrid": ["model=small-hybrid-experts"],
}
BLOCK = {"transformer": 32, "hybrid": 768}
BLOCKS = {"transformer": {"large": 512, "small": 110}, "hybrid": {"large": 512, "small": 80}}
#: Prompts of each model and workload: documents, requests of each, tokens of a document and of a question.
PROMPTS = {
    "transformer": {"documents": (20, 15, 160, 32), "others": (30, 10, 96, 64)},
    "hybrid": {"documents": (20, 15, 768, 192), "others": (30, 10, 1536, 96)},
}
OUTPUTS = {"transformer": 3, "hybrid": 4}
LOADS, FITTED_LOAD = (0.2, 0.6, 0.95), 0.6


class Server(NamedTuple):
    """One server: its model, and the size of its cache."""

    model: str
    cache: str

    @property
    def name(self) -> str:
        """As on the command line and in folders."""
        return f"{self.model}_{self.cache}"

    @property
    def settings(self) -> list[str]:
        """Overrides of the studies."""
        blocks = BLOCKS[self.model][self.cache]
        return [
            *MODELS[self.model],
            f"arms.vllm_0_32.pool.block_size={BLOCK[self.model]}",
            f"server.arguments=['--num-gpu-blocks-override','{blocks}']",
        ]


SERVERS = [Server(model, cache) for model in MODELS for cache in ("large", "small")]


class Run(NamedTuple):
    """One run: its workload, its load as a share of saturation, and the round; a load of None is the saturation."""

    server: Server
    workload: str
    load: float | None
    round: int = 0

    @property
    def folder(self) -> Path:
        """Where its study lies."""
        load = "saturation" if self.load is None else f"{self.load:g}-{self.round}"
        return OUT / "synthetic" / f"{self.server.name}-{self.workload}-{load}"

    @property
    def finished(self) -> bool:
        """Whether it need not run again."""
        return (self.folder / "summary.json").is_file()

    @property
    def words(self) -> list[str]:
        """Overrides of the workload and its arrivals."""
        groups, requests, shared, question = PROMPTS[self.server.model][self.workload]
        words = [
            "workload=synthetic",
            f"workload.output_tokens={OUTPUTS[self.server.model]}",
            f"workload.synthetic.groups={groups}",
            f"workload.synthetic.requests_per_group={requests}",
            f"workload.synthetic.prompt_tokens={shared + question}",
            "workload.synthetic.kind=fixed",
            "workload.synthetic.unit=tokens",
            f"workload.synthetic.value={shared}",
            f"output.root={OUT}",
            f"output.run={self.folder.name}",
            "output.figures=false",
        ]
        if self.load is None:
            return [*words, "arrivals=saturating"]
        saturation = Run(self.server, self.workload, None)
        (row,) = api.load(saturation.folder).runs.to_dicts()
        rate = self.load * row["requests"] / row["makespan_s"]
        return [*words, "arrivals=poisson", f"arrivals.rate_rps={rate:.4g}"]


def runs_of(server: Server) -> list[Run]:
    """Return the runs of a server in order; the second round repeats those that take least time."""
    first = [("documents", load) for load in LOADS]
    second = first if server.cache == "large" else first[1:]
    workloads = ["documents"]
    if server.cache == "large":
        workloads.append("others")
        first = [*first, ("others", FITTED_LOAD)]
    saturations = [Run(server, workload, None) for workload in workloads]
    return saturations + [Run(server, *pair, number) for number, pairs in enumerate((first, second)) for pair in pairs]


def measure(server: Server) -> None:
    """Start a server, and run what is not finished."""
    if all(run.finished for run in runs_of(server)):
        return
    folder = OUT / "servers" / f"{server.name}-{time.strftime('%H%M%S')}"
    with running(Launch(compose("rendezvous", server.settings), folder, free_port(None), LONGEST)) as started:
        for run in runs_of(server):
            if not run.finished:
                began = time.monotonic()
                serve(run, started)
                print(run.folder.name, f"{time.monotonic() - began:.0f} s", flush=True)


def serve(run: Run, started: RunningServer) -> None:
    """Run one study on a server."""
    there = [
        "server.engine=none",
        f"base_url={started.base_url}",
        f"server.step_log={started.launch.steps}",
        "server.reset_path=/reset_prefix_cache",
    ]
    own = [word for word in run.server.settings if not word.startswith("server.")]
    api.run("rendezvous", *own, *there, *run.words)


def fit(model: str) -> dict[str, Any]:
    """Fit one run of a model, predict all others, and return what the study found."""
    servers = [server for server in SERVERS if server.model == model]
    runs = [run for server in servers for run in runs_of(server) if run.load is not None]
    fitted = Run(Server(model, "large"), "documents", FITTED_LOAD)
    others = ",".join(str(run.folder) for run in runs if run != fitted)
    words = [word for word in MODELS[model] if not word.startswith("engine.")]
    where = [f"output.root={OUT}", f"output.run={model}"]
    done = api.run("twin", f"log={fitted.folder}", f"twin.predict=[{others}]", "hardware=cpu2", *words, *where)
    keys = ("parameters", "predictions", "reuse", "steps_fitted", "unseen", "server", "caveats")
    return {"fitted": fitted.folder.name, **{key: done.details[key] for key in keys}}


METRICS, ERRORS = {"ttft": "TTFT", "e2e": "E2E"}, ("mean_error", "p50_error", "p95_error")
#: Of runs with another load, cache or workload: the largest errors, and the range of the shares within intervals.
GOALS, COVERAGE = {"mean_error": 0.03, "p50_error": 0.05, "p95_error": 0.15}, (0.85, 0.95)


def publish(results: dict[str, Any]) -> None:
    """Write the tables into the page beside this file."""
    head = (
        "model, run", "differs in", "requests", "reuse equal", "hit rate", "metric", "measured", "mean, p50, p95",
        "in 90 %", "its steps ÷ modelled", "at its speed: mean, p50, p95", "repeats: mean, p50, p95",
        "tokens: mean, p50, p95",
    )  # fmt: skip
    rows = [row for model, found in results["models"].items() for row in _rows(model, found)]
    machine = f"{results['machine']}; runs of {results['runs_s'] / 60:.0f} minutes; `benchmarks/twin/live.py`."
    note = f"vLLM 0.32.0 for CPUs, running; commits {', '.join(results['commits'])}; {machine}"
    text = f"{_verdict(results)}\n{table(head, rows)}\n{note}\n"
    fill_page(HERE / "README.md", "twin_live", text)


def _rows(model: str, found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for run in found["predictions"]:
        for metric, name in METRICS.items():
            yield (
                f"{model}, {run['run'].removeprefix(f'{model}_')}",
                run["differs"],
                f"{run['requests']:,}",
                f"{run['same_reuse']:,}",
                f"{run['hit_rate']:.1%}",
                name,
                f"{run['means_s'][metric] * 1e3:,.0f} ms",
                _errors(run["errors"]["twin"][metric]),
                f"{run['covered'][metric]:.0%}",
                f"{run['slowness']:.2f}",
                _errors(run["at_speed"][metric]),
                _errors(run["floor"][metric]) if run["floor"] else "–",
                _errors(run["errors"]["tokens"][metric]),
            )


def _errors(errors: dict[str, float]) -> str:
    mean, *others = (errors[key] for key in ERRORS)
    return ", ".join((f"{100 * mean:+.1f} %", *(f"{100 * error:.1f} %" for error in others)))


def _verdict(results: dict[str, Any]) -> str:
    """Return in how many predicted runs that are no repeats of the fitted one each goal is met."""
    runs = [run for found in results["models"].values() for run in found["predictions"] if run["differs"] != "repeat"]
    lines = [f"- {sum(run['hit_rate'] == run['our_hit_rate'] for run in runs)} of {len(runs)}: equal hit rate"]
    for metric, name in METRICS.items():
        errors = [(run["errors"]["twin"][metric], (run["floor"] or {}).get(metric, {})) for run in runs]
        for key, limit in GOALS.items():
            met = sum(abs(found[key]) <= max(limit, floor.get(key, 0.0)) for found, floor in errors)
            alone = sum(abs(found[key]) <= limit for found, _ in errors)
            what = f"{name}, {key.removesuffix('_error')} within {100 * limit:.0f} %"
            known = sum(abs(run["at_speed"][metric][key]) <= limit for run in runs)
            also = f"{met} within that or the floor of repeats, {known} at the machine's own speed"
            lines.append(f"- {alone} of {len(runs)}: {what}; {also}")
        covered = sum(COVERAGE[0] <= run["covered"][metric] <= COVERAGE[1] for run in runs)
        lines.append(f"- {covered} of {len(runs)}: {name}, 85 to 95 % of the requests in their 90 % intervals")
    return "Predicted runs with another load, cache size or workload that meet each goal:\n\n" + "\n".join(lines) + "\n"


def main(*words: str) -> None:
    """Measure the named servers, or all; then fit, if all are measured."""
    names, only = [word for word in words if not word.startswith("--")], {word for word in words if word[:2] == "--"}
    commit = clean_commit()
    for server in SERVERS if only != {"--fit"} else []:
        if not names or server.name in names:
            measure(server)
    runs = [run for server in SERVERS for run in runs_of(server)]
    if only == {"--runs"} or not all(run.finished for run in runs):
        return
    finished = [api.load(run.folder) for run in runs]
    results = {
        **{key: value for key, value in facts().items() if key in ("machine", "versions", "date")},
        "commit": commit,
        "commits": sorted({run.details["commit"] for run in finished}),
        "runs_s": sum(run.runs["makespan_s"].sum() for run in finished),
        "models": {model: fit(model) for model in MODELS},
    }
    write_results(HERE / "results.json", results)
    publish(results)


if __name__ == "__main__":
    main(*sys.argv[1:])
