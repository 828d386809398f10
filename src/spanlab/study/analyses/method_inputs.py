"""Inputs of `analysis.method_scores`: records, scores and generated answers of a study, by question."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.answers import best_score, exact_match, token_f1
from spanlab.analysis.clustered import Floats
from spanlab.analysis.method_scores import ArmAnswers
from spanlab.analysis.outputs import Outputs, read_options, read_outputs, read_scores
from spanlab.core.request import Request
from spanlab.study.analyses.answers import answer_text
from spanlab.study.execution.cells import cells
from spanlab.study.findings import Finished
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import family
from spanlab.study.output.arm_files import ArmFiles
from spanlab.workloads import Workload
from spanlab.workloads.queries import tokenizer_of

SCORES = ("nll", "kl", "top1")


def read_answers(finished: Finished, questions: Sequence[Request], arm: str, files: ArmFiles) -> ArmAnswers:
    """Return one arm's answers to the requests `questions`, under the study's first seed."""
    study = finished.study
    cell = cells(study, arm)[0]
    columns = sums.read_records(files.records)
    columns = sums.select(columns, sums.at_rate(columns, cell.rate_rps) & (columns["seed"] == cell.seed))
    row_of = {number: index for index, number in enumerate(columns["request_id"].tolist())}
    rows = np.array([row_of[request.id] for request in questions], np.int64)
    (run,) = [run for run in files.finished() if run["seed"] == cell.seed and run["rate_rps"] == cell.rate_rps]
    outputs_path = files.outputs(arm, cell)
    scored = study.engine.record == "scores"
    scores = _scores(questions, read_scores(outputs_path)) if scored else {}
    right = (
        _likeliest(questions, scores["nll"], read_options(outputs_path))
        if scored
        else _right(finished, questions, read_outputs(outputs_path))
    )
    return ArmAnswers(
        arm=arm,
        family=family(study.arms[arm]),
        ttft_s=sums.delays(columns)["ttft_s"][rows],
        prompt=columns["prompt_tokens"][rows],
        computed=columns["computed_tokens"][rows],
        peak_bytes=run["kv_resident_peak_bytes"] + run["state_resident_peak_bytes"],
        scores=scores,
        right=right,
    )


def covariates(workload: Workload, questions: Sequence[Request]) -> dict[str, NDArray[np.str_]]:
    """Return buckets of the questions by covariate: task, place of the gold passage, thirds of its length."""
    ids = [request.id for request in questions]
    labels = {name: np.array(values)[ids] for name, values in workload.labels.items()}
    buckets = {}
    if "task" in labels:
        buckets["task"] = labels["task"].astype(str)
    if "gold_position" in labels:
        positions = labels["gold_position"].astype(int)
        buckets["place of the gold passage"] = np.array(
            ["not there" if position < 0 else f"{position + 1}" for position in positions]
        )
    if "gold_tokens" in labels:
        buckets["tokens of the gold passage"] = _thirds(labels["gold_tokens"].astype(int))
    return buckets


def _thirds(lengths: NDArray[np.int64]) -> NDArray[np.str_]:
    """Return the third of each length, named by its range."""
    ends = np.unique(np.quantile(lengths, (1 / 3, 2 / 3)).astype(int))
    third = np.searchsorted(ends, lengths)
    members = [lengths[third == number] for number in range(len(ends) + 1)]
    names = np.array([f"{values.min():,} to {values.max():,}" if len(values) else "" for values in members])
    return names[third]


def _scores(questions: Sequence[Request], scores: dict[int, dict[str, float]]) -> dict[str, Floats]:
    return {name: np.array([scores[request.id][name] for request in questions]) for name in SCORES}


def _likeliest(questions: Sequence[Request], gold: Floats, options: dict[int, list[float]]) -> dict[str, Floats]:
    """Return 1 where the right option has the lowest loss per token, else 0; NaN without options."""
    wrong = [min(options.get(request.id, ()), default=np.nan) for request in questions]
    return {"likeliest": np.where(np.isnan(wrong), np.nan, gold < wrong)}


def _right(finished: Finished, questions: Sequence[Request], outputs: Outputs) -> dict[str, Floats]:
    """Return the accuracy of the generated answers, each against its best gold answer."""
    tokenizer = tokenizer_of(finished.study.workload.tokenizer)
    texts = [answer_text(outputs, request, tokenizer) for request in questions]
    golds = [(request.answer or "").split("\n") for request in questions]
    choices = finished.workload.labels.get("choices", ("",) * len(finished.workload.requests))
    text_golds = list(zip(texts, golds, strict=True))
    return {
        "exact": np.array([best_score(exact_match, text, gold) for text, gold in text_golds]),
        "f1": np.array([best_score(token_f1, text, gold) for text, gold in text_golds]),
        "choice": np.array(
            [
                choice_score(text, gold[0], str(choices[request.id]).split("\n"))
                for request, (text, gold) in zip(questions, text_golds, strict=True)
            ]
        ),
    }


def choice_score(text: str, gold: str, options: Sequence[str]) -> float:
    """Return 1 where the right option alone has the highest token F1 with the answer, else 0; NaN without options."""
    if len(options) < 2:
        return float("nan")
    scores = {option: token_f1(text, option) for option in options}
    return float(all(scores[gold] > score for option, score in scores.items() if option != gold))
