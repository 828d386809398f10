"""The entry `hybrid_answers`: answers of a trained probe when documents are encoded separately."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from spanlab.probe.recall_figures import draw_answers, draw_norms
from spanlab.probe.recall_scores import HeadNorm, Score, StateError, scores
from spanlab.probe.recall_tables import answers_table, heads_table, norms_table, state_errors_table
from spanlab.settings.probe import HybridAnswers, parse_case
from spanlab.study.entries.probe_run import FOLDER, Findings, write_findings
from spanlab.study.folder import entry_folder, print_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_hybrid_answers(settings: HybridAnswers, run: str, root: Path) -> Path:
    """Answer all cases, measure norms, write a run folder, and return the folder."""
    import torch

    from spanlab.probe.norms import head_norms
    from spanlab.probe.state_errors import state_errors
    from spanlab.probe.weights import load

    started = time.perf_counter()
    torch.set_num_threads(settings.threads)
    model = load("weights", settings.weights)
    _check_vocabulary(settings, model)
    with entry_folder(settings, FOLDER, run, root) as folder:
        cases = {case: _answer_case(settings, case, model) for case in settings.cases}
        norms = list(head_norms(model, settings))
        errors = [error for case in settings.cases[:1] for error in state_errors(model, settings, case)]
        findings = _findings(settings, f"probe of {model.num_parameters():,} parameters", cases, norms, errors)
        write_findings(folder, "Answers when documents are encoded apart", settings, findings, started)
    return folder.path


def _check_vocabulary(settings: HybridAnswers, model: PreTrainedModel) -> None:
    model_size, needed = model.config.vocab_size, settings.task.vocabulary
    if model_size != needed and (settings.cases or settings.norms.tokens == "task"):
        expected = (
            f"expected a vocabulary of task.vocabulary={needed}, not {model_size}, or cases=[] norms.tokens=random"
        )
        raise ValueError(f"weights={settings.weights}: {expected}")


def _answer_case(settings: HybridAnswers, case: str, model: PreTrainedModel) -> list[Score]:
    from spanlab.probe.answers import EXACT, FULL_VIEW, answer

    case_scores = scores(answer(model, settings, *parse_case(case)), FULL_VIEW, EXACT)
    shown = {score.arm: f"{score.accuracy.mean:.1%}" for score in case_scores if score.arm in (FULL_VIEW, EXACT)}
    print_line(Console(stderr=True), f"{case}: {', '.join(f'{arm} {accuracy}' for arm, accuracy in shown.items())}")
    return case_scores


def _findings(
    settings: HybridAnswers,
    model: str,
    cases: Mapping[str, Sequence[Score]],
    norms: Sequence[HeadNorm],
    errors: Sequence[StateError],
) -> Findings:
    description = f"{settings.sequences} sequences of {settings.task.questions} questions"
    answer_tables = [answers_table(case, case_scores, _title(case, description)) for case, case_scores in cases.items()]
    states = [state_errors_table(case, errors) for case in settings.cases[:1]]
    draws = {"answers": partial(draw_answers, cases)} if cases else {}
    return Findings(
        data=f"{description} each, documents x tokens {', '.join(cases)}",
        model=model,
        tables=[*answer_tables, norms_table(norms), *states, heads_table(norms)],
        printed=len(answer_tables) + 1 + len(states),
        figures=draws | {"norms": partial(draw_norms, norms)},
    )


def _title(case: str, description: str) -> str:
    documents, tokens = parse_case(case)
    return f"Answers after {documents} documents of {tokens} tokens\n{description}"
