"""The analysis `answers`: how far every arm's predictions are from the baseline's, and how often its answers are right.

The baseline recomputes everything. With `engine.teacher=baseline` all arms predict after the same tokens,
which is what divergence needs; with null each arm writes its own answer, which is what accuracy needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analysis.answer_rows import ArmResult, arm_rows
from spanlab.analysis.divergence import Divergence, divergence, greedy_match
from spanlab.analysis.judge import Case, JudgeSettings, judge_all
from spanlab.analysis.outputs import Outputs, read_outputs
from spanlab.core.request import Request
from spanlab.queries import ChatTokenizer
from spanlab.report.analyses.answers import answers_table
from spanlab.settings import Study
from spanlab.settings.analyses import ANALYSES
from spanlab.study.execution.cells import cells
from spanlab.study.findings import Findings, Finished
from spanlab.study.machine.aa import repeat_files
from spanlab.study.output.arm_files import ArmFiles
from spanlab.workloads.queries import tokenizer_of

Label = str | int


@ANALYSES.register("answers")
def score_answers(finished: Finished) -> Findings:
    """One entry for each arm and combination of labels of the requests that have a gold answer."""
    study, labels = finished.study, finished.workload.labels
    outputs = {arm: _outputs(study, arm, files) for arm, files in finished.files.items()}
    if study.baseline not in outputs:
        return Findings({"answers": []}, caveats=(f"no answers are compared, for {study.baseline} failed",))
    again = _outputs(study, study.baseline, repeat_files(finished.folder, study.baseline))
    entries = []
    for values, requests in asked(finished.workload.requests, labels).items():
        told = dict(zip(labels, values, strict=True))
        entries += [told | entry for entry in _entries(study, outputs, again, requests)]
    return Findings({"answers": entries}, tables=(answers_table(entries, list(labels), study.baseline),))


def asked(requests: Sequence[Request], labels: Mapping[str, Sequence[Label]]) -> dict[tuple[Label, ...], list[Request]]:
    """The requests that have a gold answer, by their labels."""
    found: dict[tuple[Label, ...], list[Request]] = {}
    for at, request in enumerate(requests):
        if request.answer is not None:
            found.setdefault(tuple(values[at] for values in labels.values()), []).append(request)
    return found


def _outputs(study: Study, arm: str, files: ArmFiles) -> Outputs:
    """What an arm generated under the study's first seed; other seeds ask the same questions."""
    return read_outputs(files.outputs(arm, cells(study, arm)[0]))


def _entries(
    study: Study, outputs: Mapping[str, Outputs], again: Outputs, requests: Sequence[Request]
) -> list[dict[str, Any]]:
    base, tokenizer = outputs[study.baseline], tokenizer_of(study.workload.tokenizer)
    # random weights answer nothing, and given answers are not the arm's
    answers, stop = study.engine.weights != "random" and study.engine.teacher is None, _stop(tokenizer)
    results = []
    for arm, own in outputs.items():
        texts = tuple(written(own, request, tokenizer) for request in requests) if answers else ()
        apart = () if arm == study.baseline else _divergences(base, own, requests, stop)
        results.append(ArmResult(arm, texts, apart))
    floor = _divergences(base, again, requests, stop)
    rows = arm_rows(results, [[request.answer or ""] for request in requests], floor, study.baseline)
    entries = [_plain(asdict(row)) for row in rows]
    if study.judge.base_url:
        for entry, result in zip(entries, results, strict=True):
            entry["judge"] = _judged(study.judge, requests, result.answers, tokenizer)
    return entries


def _divergences(base: Outputs, own: Outputs, requests: Sequence[Request], stop: int | None) -> tuple[Divergence, ...]:
    """Divergences from the baseline up to the end of its answer, request by request.

    Empty where logits were not kept, or where tokens differ, so that predictions are of different texts.
    """
    found = []
    for request in requests:
        rows, others = (outputs.logits.get(request.id) for outputs in (base, own))
        tokens = base.tokens[request.id]
        if rows is None or others is None or not np.array_equal(tokens, own.tokens[request.id]):
            return ()
        ends = _ends(tokens, stop)
        answered = int(ends[0]) + 1 if len(ends) else len(tokens)
        rows, others = rows[:answered], others[:answered]
        chosen = [logits.argmax(1).tolist() for logits in (rows, others)]
        found.append(divergence(rows, others, greedy_match(*chosen)))
    return tuple(found)


def written(outputs: Outputs, request: Request, tokenizer: ChatTokenizer) -> str:
    """What was written, up to the token that ends the answer."""
    tokens = outputs.tokens[request.id]
    ends = _ends(tokens, _stop(tokenizer))
    return tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens).strip()


def _stop(tokenizer: ChatTokenizer) -> int | None:
    """The token that ends an answer."""
    return None if tokenizer.eos_token is None else tokenizer.tokenizer.token_to_id(tokenizer.eos_token)


def _ends(tokens: NDArray[np.int32], stop: int | None) -> NDArray[np.int64]:
    """Where an answer ends among its tokens; empty where it was cut off."""
    return np.empty(0, np.int64) if stop is None else np.flatnonzero(tokens == stop)


def _judged(
    judge: JudgeSettings, requests: Sequence[Request], answers: Sequence[str], tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Mean score of a judging model, over the answers that it scored."""
    prompts = [tokenizer.decode(request.tokens) for request in requests]
    told = zip(prompts, requests, answers, strict=True)
    found = judge_all(judge, [Case(prompt, request.answer or "", answer) for prompt, request, answer in told])
    mean = float(np.mean(found.scores)) if found.scores else None
    return {"mean": mean, "judged": len(found.scores), "failures": found.failures}


def _plain(value: Any) -> Any:
    """Intervals as lists, for a file that knows no tuples with names."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
