"""What `analysis.method_scores` reads of a study: records, scores and written answers, question by question."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.answers import best, exact_match, token_f1
from spanlab.analysis.clustered import Floats
from spanlab.analysis.method_scores import ArmAnswers
from spanlab.analysis.outputs import Outputs, read_options, read_outputs, read_scores
from spanlab.core.request import Request
from spanlab.study.analyses.answers import written
from spanlab.study.execution.cells import cells
from spanlab.study.findings import Finished
from spanlab.study.numbers import summary as sums
from spanlab.study.numbers.results import family
from spanlab.study.output.arm_files import ArmFiles
from spanlab.workloads import Workload
from spanlab.workloads.queries import tokenizer_of

SCORES = ("nll", "kl", "top1")


def read_answers(finished: Finished, asked: Sequence[Request], arm: str, files: ArmFiles) -> ArmAnswers:
    """One arm's answers to the questions `asked`, under the study's first seed."""
    study = finished.study
    cell = cells(study, arm)[0]
    columns = sums.read_records(files.records)
    columns = sums.select(columns, sums.at_rate(columns, cell.rate_rps) & (columns["seed"] == cell.seed))
    place = {number: at for at, number in enumerate(columns["request_id"].tolist())}
    rows = np.array([place[request.id] for request in asked], np.int64)
    (row,) = [one for one in files.finished() if one["seed"] == cell.seed and one["rate_rps"] == cell.rate_rps]
    kept = files.outputs(arm, cell)
    scored = study.engine.record == "scores"
    scores = _scores(asked, read_scores(kept)) if scored else {}
    right = (
        _likeliest(asked, scores["nll"], read_options(kept)) if scored else _right(finished, asked, read_outputs(kept))
    )
    return ArmAnswers(
        arm=arm,
        family=family(study.arms[arm]),
        ttft_s=sums.delays(columns)["ttft_s"][rows],
        prompt=columns["prompt_tokens"][rows],
        computed=columns["computed_tokens"][rows],
        peak_bytes=row["kv_resident_peak_bytes"] + row["state_resident_peak_bytes"],
        scores=scores,
        right=right,
    )


def covariates(workload: Workload, asked: Sequence[Request]) -> dict[str, NDArray[np.str_]]:
    """What loss may depend on, a bucket per question: task, place of the gold passage, thirds of its length."""
    at = [request.id for request in asked]
    labels = {name: np.array(values)[at] for name, values in workload.labels.items()}
    found = {}
    if "task" in labels:
        found["task"] = labels["task"].astype(str)
    if "gold_position" in labels:
        places = labels["gold_position"].astype(int)
        found["place of the gold passage"] = np.array(
            ["not there" if place < 0 else f"{place + 1}" for place in places]
        )
    if "gold_tokens" in labels:
        found["tokens of the gold passage"] = _thirds(labels["gold_tokens"].astype(int))
    return found


def _thirds(lengths: NDArray[np.int64]) -> NDArray[np.str_]:
    """Each length's third, named by its ends."""
    ends = np.unique(np.quantile(lengths, (1 / 3, 2 / 3)).astype(int))
    third = np.searchsorted(ends, lengths)
    own = [lengths[third == one] for one in range(len(ends) + 1)]
    names = np.array([f"{part.min():,} to {part.max():,}" if len(part) else "" for part in own])
    return names[third]


def _scores(asked: Sequence[Request], found: dict[int, dict[str, float]]) -> dict[str, Floats]:
    return {name: np.array([found[request.id][name] for request in asked]) for name in SCORES}


def _likeliest(asked: Sequence[Request], gold: Floats, options: dict[int, list[float]]) -> dict[str, Floats]:
    """Whether the right option has the lowest loss per token; NaN without options."""
    wrong = [min(options.get(request.id, ()), default=np.nan) for request in asked]
    return {"likeliest": np.where(np.isnan(wrong), np.nan, gold < wrong)}


def _right(finished: Finished, asked: Sequence[Request], outputs: Outputs) -> dict[str, Floats]:
    """How right the written answers are, each by its best gold answer."""
    tokenizer = tokenizer_of(finished.study.workload.tokenizer)
    texts = [written(outputs, request, tokenizer) for request in asked]
    golds = [(request.answer or "").split("\n") for request in asked]
    choices = finished.workload.labels.get("choices", ("",) * len(finished.workload.requests))
    told = list(zip(texts, golds, strict=True))
    return {
        "exact": np.array([best(exact_match, text, gold) for text, gold in told]),
        "f1": np.array([best(token_f1, text, gold) for text, gold in told]),
        "choice": np.array(
            [
                chosen(text, gold[0], str(choices[request.id]).split("\n"))
                for request, (text, gold) in zip(asked, told, strict=True)
            ]
        ),
    }


def chosen(text: str, gold: str, options: Sequence[str]) -> float:
    """1 where the written answer has the highest token F1 with the right option, alone; NaN without options."""
    if len(options) < 2:
        return float("nan")
    scores = {option: token_f1(text, option) for option in options}
    return float(all(scores[gold] > score for option, score in scores.items() if option != gold))
