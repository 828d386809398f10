"""The benchmark from settings to report."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from spanlab.bench import machine, noise, rates
from spanlab.bench.bed import Bed
from spanlab.bench.machine import device_name, engine_facts, progress
from spanlab.bench.rows import RowFile
from spanlab.checkpoint_bench import figures, rounds
from spanlab.checkpoint_bench.rows import Row
from spanlab.checkpoint_bench.summary import summarise
from spanlab.checkpoint_bench.table import as_tables
from spanlab.checkpoint_bench.theory import Theory
from spanlab.engine.load import ModelChoice, load_model, read_config
from spanlab.engine.model import spec_of
from spanlab.model_spec import ModelSpec
from spanlab.settings.arms import check_arm, check_learning
from spanlab.settings.checkpoint_bench import CheckpointBench
from spanlab.study.folder import RunFolder
from spanlab.study.provenance import run_facts
from spanlab.terminal import printed
from spanlab.tracking import Tracker, tracked

# Settings that say where a run is done, not what comes out of it: a run may be resumed with others.
_INCIDENTAL = ("output", "tracking")


def run_bench(settings: CheckpointBench, name: str, root: Path) -> Path:
    """Run the benchmark and leave its folder; returns the folder. `name` is the entry's, `root` where outputs go."""
    started = time.perf_counter()
    console = Console(stderr=True)
    threads = machine.use_threads(settings.engine)
    check(settings)
    config = asdict(settings)
    run = settings.output.run or name
    kept = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    text = OmegaConf.to_yaml(OmegaConf.create(kept))
    with (
        RunFolder(root, "checkpoint_bench", run, settings.output.if_exists, text) as folder,
        tracked(settings.tracking, run, name, config, folder.work) as tracker,
    ):
        summary = _measured(settings, folder.work, console, threads)
        summary |= run_facts(time.perf_counter() - started) | {"engine": engine_facts()}
        _report(settings, summary, folder.work, tracker)
        folder.finish()
    console.print(str(folder.path), markup=False, highlight=False, soft_wrap=True)
    return folder.path


def choice_of(settings: CheckpointBench, name: str) -> ModelChoice:
    """The model to load."""
    engine, device = settings.engine, machine.device_of(settings.engine)
    return ModelChoice(name, engine.weights, engine.path, dtype=engine.dtype, device=device, seed=engine.seed)


def spec_of_choice(settings: CheckpointBench, name: str) -> ModelSpec:
    """What a model costs, told by its config alone."""
    return spec_of(name, read_config(choice_of(settings, name)), getattr(torch, settings.engine.dtype).itemsize)


def check(settings: CheckpointBench) -> None:
    """Refuse before anything is measured: a model without states, a prompt beyond its context, pages off its grid."""
    for name in settings.models:
        spec = spec_of_choice(settings, name)
        if not spec.is_hybrid:
            raise ValueError(f"models={name}: expected a hybrid model, for it has no recurrent state to keep")
        context = read_config(choice_of(settings, name)).max_position_embeddings
        if max(settings.lengths) > context:
            raise ValueError(f"lengths={max(settings.lengths)}: expected at most the {context:,} positions of {name}")
        for arm in settings.chosen():
            check_arm(arm, settings.arms[arm], spec)
            check_learning(arm, settings.arms[arm], 0)


def _measured(settings: CheckpointBench, folder: Path, console: Console, threads: int) -> dict[str, Any]:
    """Rows, what they come to, and the machine; `load` is its load average before and after."""
    before = os.getloadavg()[0]
    device = torch.device(machine.device_of(settings.engine))
    found = rates.measure(getattr(torch, settings.engine.dtype), device)
    expected = dict.fromkeys(rounds.cells(settings), rounds.rows_of(settings))
    with RowFile(folder / "rows.jsonl", Row, expected) as file, progress(console) as bars:
        _measure(settings, file, bars, folder)
    curves = [
        {"model": name, "length": length}
        | Theory(spec_of_choice(settings, name), found, settings.hardware).curve(length, settings.token_budget)
        for name in settings.models
        for length in settings.lengths
    ]
    return {
        "weights": settings.engine.weights,
        "dtype": settings.engine.dtype,
        "device": device_name(device),
        "threads": threads,
        "hardware": settings.hardware.name,
        "rates": asdict(found),
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        **_concluded(settings, file.rows, folder),
        "curves": curves,
    }


def _concluded(settings: CheckpointBench, rows: list[Row], folder: Path) -> dict[str, Any]:
    """What rows come to, and the machine's noise; on a noisy machine no ratios of times."""
    found, summary = noise.of_run(rounds.baseline_repeats(rows), folder), summarise(settings, rows)
    sentence = found.sentence("speedups")
    if sentence:
        noise.withheld(summary["again"], ("speedup",))
    told = {"machine_noise": found.summary(), "machine_words": found.words}
    return summary | told | {"caveats": [sentence] if sentence else []}


def _measure(settings: CheckpointBench, file: RowFile[Row], bars: Progress, folder: Path) -> None:
    todo = [cell for cell in rounds.cells(settings) if cell not in file.done]
    task = bars.add_task("requests", total=rounds.rows_of(settings) * len(todo))
    bed: Bed | None = None
    length: rounds.Length | None = None
    for cell in todo:
        bars.update(task, description=f"{cell.model} {cell.length:,} tokens, round {cell.round + 1}")
        if bed is None or bed.name != cell.model:
            bed = length = None  # its memory goes before the next model is loaded
            bed = lay_bed(settings, cell.model)
            readings = noise.Watch(bed, settings.engine, folder)
        if length is None or length.prompts.length != cell.length:
            length = rounds.Length(settings, bed, cell.length)
        readings.take()
        for row in length.round(cell):
            file.add(row)
            bars.advance(task)


def lay_bed(settings: CheckpointBench, name: str) -> Bed:
    """Load one model."""
    model = load_model(choice_of(settings, name))
    return Bed(name, model, model.spec(), rates.measure(model.dtype, model.device))


def _report(settings: CheckpointBench, summary: dict[str, Any], folder: Path, tracker: Tracker) -> None:
    (folder / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    with printed(200) as shown:
        shown.print(Text(f"{title(settings)}\n{footer(summary)}\n"))
        shown.print(as_tables(summary, settings.baseline, settings.hardware.name), "")
        shown.print(Text("\n".join([summary["machine_words"], *summary["caveats"]])), "")
    tracker.table("captures", *flat(summary["captures"], "overhead"))
    tracker.table("again", *flat(summary["again"], "speedup"))
    if settings.output.figures:
        drawn = figures.write(summary, title(settings), footer(summary), folder / "figures")
        tracker.figures([path for path in drawn if path.suffix == ".png"])
    tracker.summary({key: value for key, value in summary.items() if key not in ("captures", "again", "curves")})


def flat(entries: list[dict[str, Any]], key: str) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of plain numbers for the tracker: what is one number, and the median of `key`."""
    names = (
        [name for name, value in entries[0].items() if name != key and not isinstance(value, dict)] if entries else []
    )
    return [*names, key], [[*(entry[name] for name in names), (entry[key] or {}).get("p50")] for entry in entries]


def title(settings: CheckpointBench) -> str:
    """What was measured, in one line."""
    depths = ", ".join(f"{100 * depth:g} %" for depth in sorted(settings.depths))
    return f"one sequence cold, then later prompts that share {depths} of it, {settings.rounds} rounds"


def footer(summary: dict[str, Any]) -> str:
    """Where the numbers come from, in one line."""
    found = summary["rates"]
    return " · ".join(
        (
            f"{summary['weights']} weights, {summary['dtype']}, random tokens",
            f"{summary['device']} of {summary['machine']}, threads: {summary['threads']}",
            f"matmul {found['flops_per_s'] / 1e9:.3g} GFLOP/s, copy {found['bytes_per_s'] / 1e9:.3g} GB/s, measured",
            f"torch {summary['engine']['torch']}, transformers {summary['engine']['transformers']}",
            f"commit {summary['commit']}",
            *summary["caveats"],
        )
    )
