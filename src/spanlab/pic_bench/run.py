"""The benchmark from settings to report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
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
from spanlab.bench.machine import device_name, engine_facts, progress
from spanlab.bench.rows import RowFile
from spanlab.engine.load import read_config
from spanlab.analysis.judge import JudgeOptions
from spanlab.evaluation.trained import require_trained
from spanlab.pic_bench import figures, ground, quality, timing
from spanlab.pic_bench.ground import Ground
from spanlab.pic_bench.prompts import Trial
from spanlab.pic_bench.quality import Answer
from spanlab.pic_bench.rows import Cell, Row
from spanlab.pic_bench.summary import summarise
from spanlab.pic_bench.table import as_table
from spanlab.pic_bench.verdicts import as_table as verdict_table
from spanlab.pic_bench.verdicts import verdicts
from spanlab.settings.pic_bench import JUDGED, TIMED, PicBench
from spanlab.study.folder import RunFolder
from spanlab.study.provenance import run_facts
from spanlab.terminal import printed
from spanlab.tracking import Tracker, tracked

# Settings that say where and how a run is done, not what comes out of it: a run may be resumed with others.
_INCIDENTAL = ("output", "tracking", "judge")


def run_bench(settings: PicBench, name: str, root: Path) -> Path:
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
        RunFolder(root, "pic_bench", run, settings.output.if_exists, text) as folder,
        tracked(settings.tracking, run, name, config, folder.work) as tracker,
    ):
        summary = _measured(settings, folder.work, console, threads)
        summary |= run_facts(time.perf_counter() - started) | {"engine": engine_facts()}
        _report(settings, summary, folder.work, tracker)
        folder.finish()
    console.print(str(folder.path), markup=False, highlight=False, soft_wrap=True)
    return folder.path


def check(settings: PicBench) -> None:
    """Refuse before anything is measured: a tokenizer, a model or a prompt that cannot be."""
    if "accuracy" in settings.outputs:
        require_trained(settings.engine.weights)
    if settings.judge.base_url:
        JudgeOptions(**asdict(settings.judge))
    for name in settings.swept_models:
        tokenizer = ground.tokenizer_of(settings, name)
        texts = ground.texts_of(settings)
        context = read_config(ground.choice_of(settings, name, tokenizer)).max_position_embeddings
        size = settings.swept_sizes[-1]
        trial = timing.trial_of(settings, texts, tokenizer, size, 0)
        timing.check_fits(settings, size, trial.requests("same")[0], name, context)


def _measured(settings: PicBench, folder: Path, console: Console, threads: int) -> dict[str, Any]:
    """Times, then quality, and the rates of the machine; `load` is its load average before and after."""
    before = os.getloadavg()[0]
    summary: dict[str, Any] = {
        "weights": settings.engine.weights,
        "dtype": settings.engine.dtype,
        "tokenizer": ground.tokenizer_of(settings, settings.swept_models[0]).name,
        "threads": threads,
    }
    expected = {cell: timing.rows_of(settings, cell) for cell in timing.cells(settings)}
    with RowFile(folder / "rows.jsonl", Row, expected) as file, progress(console) as bars:
        if set(settings.outputs) & set(TIMED):
            _time(settings, file, bars, folder)
        summary["entries"] = summarise(settings, file.rows)
        summary |= _noise(settings, file.rows, summary["entries"], folder)
    summary["quality"] = _quality(settings, folder, console) if set(settings.outputs) & set(JUDGED) else []
    device = torch.device(machine.device_of(settings.engine))
    found = rates.measure(getattr(torch, settings.engine.dtype), device)
    load = [round(before, 1), round(os.getloadavg()[0], 1)]
    return summary | {"device": device_name(device), "rates": asdict(found), "load": load}


def _quality(settings: PicBench, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Every question to every model; what an interrupted run has finished is not asked again."""
    chains = quality.chains(settings)
    todo = [(model, number) for model in settings.swept_models for number in range(len(chains))]
    rows = quality.rows_of(settings)
    laid: Ground | None = None
    with RowFile(folder / "answers.jsonl", Answer, dict.fromkeys(todo, rows)) as file, progress(console) as bars:
        left = [cell for cell in todo if cell not in file.done]
        task = bars.add_task("answers", total=rows * len(left))
        for model, number in left:
            if laid is None or laid.name != model:
                laid = None  # its memory goes before the next model is loaded
                laid = ground.lay_ground(settings, model)
            bars.update(task, description=f"{model} question {number}")
            for one in quality.answers(settings, laid, number, chains[number]):
                file.add(one)
                bars.advance(task)
        return verdicts(file.rows, [chain.question for chain in chains], settings.judge)


def _noise(settings: PicBench, rows: Sequence[Row], entries: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What the summary says of the machine; on a noisy one the entries lose their speedups."""
    found = noise.of_run(timing.baseline_repeats(settings, rows), folder)
    sentence = found.sentence("speedups")
    if sentence:
        noise.withheld(entries, ("speedup", "speedup_of_bound"))
    return {"machine_noise": found.summary(), "noise": found.words, "caveats": [sentence] if sentence else []}


def _time(settings: PicBench, file: RowFile[Row], bars: Progress, folder: Path) -> None:
    todo = [cell for cell in timing.cells(settings) if cell not in file.done]
    task = bars.add_task("requests", total=sum(timing.rows_of(settings, cell) for cell in todo))
    laid: Ground | None = None
    before: Cell | None = None
    trial: Trial | None = None
    for cell in todo:
        if laid is None or before is None or cell.model != before.model:
            laid = None  # its memory goes before the next model is loaded
            laid, before = ground.lay_ground(settings, cell.model), None
            readings = noise.Watch(laid, settings.engine, folder)
        if before is None or cell.size != before.size:
            timing.warm_up(settings, laid, cell.size)
        if before is None or trial is None or cell[1:3] != before[1:3]:
            trial = timing.make_trial(settings, laid, cell.size, cell.trial)
            readings.take()
        bars.update(task, description=f"{cell.model} {cell.size} {cell.arm}")
        for row in timing.run_cell(settings, laid, cell, trial):
            file.add(row)
            bars.advance(task)
        before = cell


def _report(settings: PicBench, summary: dict[str, Any], folder: Path, tracker: Tracker) -> None:
    data = orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n"
    (folder / "summary.json").write_bytes(data)
    if "json" in settings.outputs:
        sys.stdout.write(data.decode())
    else:
        with printed(200) as shown:
            _print(settings, summary, shown)
    if summary["entries"]:
        tracker.table("entries", *flat(summary["entries"]))
        if settings.output.figures:
            drawn = figures.write(summary["entries"], title(settings), footer(summary), folder / "figures")
            tracker.figures([path for path in drawn if path.suffix == ".png"])
    tracker.summary({key: value for key, value in summary.items() if key != "entries"})


def _print(settings: PicBench, summary: dict[str, Any], console: Console) -> None:
    console.print(Text(f"{title(settings)}\n{footer(summary)}\n"))
    if summary["entries"]:
        outputs = set(settings.outputs) | ({"prepare"} if settings.prepare else set())
        outputs -= {"speedup"} if summary["caveats"] else set()
        console.print(as_table(summary["entries"], outputs, settings.baseline), "")
        console.print(Text("\n".join([summary["noise"], *summary["caveats"]])), "")
    if summary["quality"]:
        console.print(verdict_table(summary["quality"]))


def flat(entries: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of plain numbers for the tracker."""
    names = ("model", "size", "arm", "order", "prompt_tokens", "token_hit_rate", "bound_s", "of_bound", "bound_speedup")
    medians = [(entry["warm_ttft_s"]["p50"], (entry["speedup"] or {}).get("p50")) for entry in entries]
    rows = [[*(entry[name] for name in names), *own] for entry, own in zip(entries, medians, strict=True)]
    return [*names, "warm_ttft_s", "speedup"], rows


def title(settings: PicBench) -> str:
    """What was measured, in one line."""
    return f"{settings.documents} documents, {settings.trials} trials of 1 cold and {settings.repeats} further requests"


def footer(summary: dict[str, Any]) -> str:
    """Where the numbers come from, in one line."""
    found = summary["rates"]
    return " · ".join(
        (
            f"{summary['weights']} weights, {summary['dtype']}",
            f"{summary['tokenizer']} tokenizer, invented words",
            f"{summary['device']}, {summary['threads']} threads",
            f"matmul {found['flops_per_s'] / 1e9:.3g} GFLOP/s, copy {found['bytes_per_s'] / 1e9:.3g} GB/s, measured",
            f"commit {summary['commit']}",
            *summary["caveats"],
        )
    )
