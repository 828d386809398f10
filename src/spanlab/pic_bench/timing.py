"""Times: every arm in every trial, from an empty cache, one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spanlab.bench.bound import Roofline
from spanlab.bench.session import Served, Session
from spanlab.build import build_repair
from spanlab.core.request import Request
from spanlab.evaluation.fresh_text import DOCUMENT_WORDS
from spanlab.pic_bench.ground import Ground
from spanlab.pic_bench.prompts import Order, Trial
from spanlab.pic_bench.rows import Cell, Kind, Row
from spanlab.pic_bench.texts import Texts
from spanlab.queries import ChatTokenizer
from spanlab.settings import Strategy
from spanlab.settings.pic_bench import PicBench
from spanlab.study.warm_up import warm_up as run_warm_up

_SMALL = "xs"


def orders(strategy: Strategy) -> tuple[Order, ...]:
    """Prefix caches are asked with documents where they were, too: there lies what they can do."""
    return ("same", "shuffled") if strategy.keep and strategy.spans is None else ("shuffled",)


def arms(settings: PicBench) -> list[tuple[str, Order]]:
    """Arms with the orders they are asked in."""
    return [(name, order) for name in settings.chosen() for order in orders(settings.arms[name])]


def cells(settings: PicBench) -> list[Cell]:
    """All cells of a run in their order: arms take turns within a trial, so that what disturbs one disturbs all."""
    return [
        Cell(model, size, trial, arm, order)
        for model in settings.swept_models
        for size in settings.swept_sizes
        for trial in range(settings.trials)
        for arm, order in arms(settings)
    ]


def rows_of(settings: PicBench, cell: Cell) -> int:
    """Rows of a complete cell."""
    prepares = settings.prepare and settings.arms[cell.arm].keep
    return 1 + settings.repeats + (settings.documents if prepares else 0)


def trial_of(settings: PicBench, texts: Texts, tokenizer: ChatTokenizer, size: str, number: int) -> Trial:
    """The trial of that number."""
    return Trial(
        texts,
        tokenizer,
        settings.seed,
        number,
        DOCUMENT_WORDS[size],
        settings.documents,
        settings.repeats,
        settings.question_words,
        settings.output_tokens,
    )


def make_trial(settings: PicBench, ground: Ground, size: str, number: int) -> Trial:
    """The trial of that number, whose prompts must fit the model."""
    trial = trial_of(settings, ground.texts, ground.tokenizer, size, number)
    check_fits(settings, size, trial.requests("same")[0], ground.name, ground.model.context)
    return trial


def check_fits(settings: PicBench, size: str, request: Request, model: str, context: int) -> None:
    """Refuse a prompt that is longer than the model's context."""
    tokens = request.num_tokens + request.output_len
    if tokens > context:
        raise ValueError(
            f"sizes={size} with documents={settings.documents}: prompt and output of {tokens:,} tokens; "
            f"expected at most the {context:,} positions of {model}"
        )


def warm_up(settings: PicBench, ground: Ground, size: str) -> None:
    """Let every arm run once uncounted: a GPU compiles and chooses kernels by size, a CPU only loads code."""
    words = size if ground.model.device.type == "cuda" else _SMALL
    trial = make_trial(settings, ground, words, 0)

    def serve(arm: str, asked: list[Request]) -> None:
        with Session(ground, settings.arms[arm], asked, settings.token_budget) as session:
            for request in asked:
                session.ask(request)

    run_warm_up(settings.chosen(), trial.requests("shuffled"), serve)


def baseline_repeats(settings: PicBench, rows: Sequence[Row]) -> list[list[float]]:
    """TTFT of the baseline's requests by cell, seconds: as many tokens each, all of them computed (A/A)."""
    cells: dict[Cell, list[float]] = {}
    for row in rows:
        if row.arm == settings.baseline and row.kind != "prepare":
            cells.setdefault(row.cell, []).append(row.ttft_s)
    return list(cells.values())


def run_cell(settings: PicBench, ground: Ground, cell: Cell, trial: Trial) -> Iterator[Row]:
    """The rows of one arm in one trial, each as soon as it is there."""
    strategy = settings.arms[cell.arm]
    asked = trial.requests("same" if cell.order == "same" else "shuffled")
    alone = trial.alone if settings.prepare and strategy.keep else []
    spans = strategy.spans
    roofline = Roofline(ground.spec, ground.rates, build_repair(spans.repair) if spans else None)
    with Session(ground, strategy, [*alone, *asked], settings.token_budget) as session:
        for index, request in enumerate([*alone, *asked]):
            kind: Kind = "prepare" if index < len(alone) else "warm" if request.id or alone else "cold"
            row = _row(cell, kind, index - len(alone) if index >= len(alone) else index, session.ask(request), roofline)
            if kind == "cold" or not strategy.keep:
                assert row.reused_tokens == 0 and row.computed_tokens == row.prompt_tokens, "a cold request reused"
            yield row


def _row(cell: Cell, kind: Kind, index: int, served: Served, roofline: Roofline) -> Row:
    record = served.record
    until = [number for number, plan in enumerate(served.plans) if plan.chunks]  # what comes after them only decodes
    steps = [served.steps[number] for number in until]
    plans = [served.plans[number] for number in until]
    bound = roofline.of(plans)
    ttft = record.first_token_s - record.admitted_s
    phases = ("plan_s", "copy_s", "fill_s", "repair_s", "prefill_s")
    parts: dict[str, Any] = {name: sum(step.phases[name] for step in steps) for name in phases}
    return Row(
        *cell,
        kind=kind,
        index=index,
        prompt_tokens=record.prompt_tokens,
        reused_tokens=record.reused_tokens,
        computed_tokens=record.computed_tokens,
        repaired_tokens=record.repaired_tokens,
        copied_tokens=record.copied_tokens,
        output_tokens=record.output_tokens,
        ttft_s=ttft,
        finished_s=record.finished_s - record.admitted_s,
        **parts,
        other_s=ttft - sum(parts.values()),
        bound_s=bound.seconds,
        compute_s=bound.compute_s,
        memory_s=bound.memory_s,
    )
