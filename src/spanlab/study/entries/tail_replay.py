"""The entry `tail_replay`: predictions of a hybrid after inexact recovery of its state, and after stored states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from spanlab.model_files import find_spec
from spanlab.probe.recovery_figure import draw_recoveries
from spanlab.probe.recovery_scores import RecoveryResult, Source
from spanlab.probe.recovery_tables import layers_table, price_table, recovery_table, stored_table
from spanlab.probe.replay_price_scores import price
from spanlab.report.cells import Table
from spanlab.settings.tail_replay import TailReplay
from spanlab.study.entries.probe_run import FOLDER, Findings, write_findings
from spanlab.study.folder import entry_folder, print_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CAVEATS = (
    "models of a few million parameters, with random weights or trained on synthetic facts: sizes of errors need not "
    "be those of published weights",
)


def run_tail_replay(settings: TailReplay, run: str, root: Path) -> Path:
    """Measure every model, write a run folder, and return the folder."""
    import torch

    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    with entry_folder(settings, FOLDER, run, root) as folder:
        replays, formats = _measure(settings)
        findings = Findings(
            data=f"{settings.sequences} prompts of {settings.documents} x {settings.tokens} tokens, "
            f"{settings.task.questions} questions each",
            model=f"{len(settings.weights)} trained and {len(settings.groups) * len(settings.scores)} random hybrids",
            tables=[recovery_table(replays), layers_table(replays), stored_table(formats), *_price_tables(settings)],
            printed=4,
            figures={"recoveries": partial(draw_recoveries, replays)},
            caveats=CAVEATS,
        )
        write_findings(folder, "Recovery of recurrent states behind a gap", settings, findings, started)
    return folder.path


def _measure(settings: TailReplay) -> tuple[list[RecoveryResult], list[RecoveryResult]]:
    """Measure recoveries, and states stored in fewer bytes, for all models."""
    from spanlab.probe.tail_replay import measure, recoveries, stored_state_arms

    replays: list[RecoveryResult] = []
    formats: list[RecoveryResult] = []
    for source, model in _models(settings):
        print_line(Console(stderr=True), f"{source.name}, {len(source.below)} recurrent layers")
        replays += measure(source, model, settings, recoveries(), settings.gaps)
        formats += measure(source, model, settings, stored_state_arms(), [0, max(settings.gaps)])
    return replays, formats


def _price_tables(settings: TailReplay) -> list[Table]:
    specs, gap = map(find_spec, settings.models), max(settings.gaps)
    prices = [price(model, context, gap) for model in specs for context in settings.contexts]
    return [price_table(prices)] if prices else []


def _models(settings: TailReplay) -> Iterator[tuple[Source, PreTrainedModel]]:
    from spanlab.probe.tail_replay import random_models, source_of
    from spanlab.probe.weights import load

    for folder in settings.weights:
        model = load("weights", folder)
        if (vocab_size := model.config.vocab_size) != settings.task.vocabulary:
            raise ValueError(f"weights={folder}: expected a vocabulary of {settings.task.vocabulary}, not {vocab_size}")
        yield source_of(f"trained, {Path(folder).absolute().parent.name}", model, trained=True), model
    yield from random_models(settings)
