"""The analysis `answers`: divergence of each arm's predictions from the baseline's, and accuracy of its answers.

The baseline recomputes everything. With `engine.teacher=baseline` all arms predict after the same tokens, as divergence
requires. With null each arm generates an answer, as accuracy requires.
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
    """Return one entry per arm and combination of labels, over the requests with a gold answer."""
    study, labels = finished.study, finished.workload.labels
    outputs = {arm: _outputs(study, arm, files) for arm, files in finished.files.items()}
    if study.baseline not in outputs:
        return Findings({"answers": []}, caveats=(f"no answers are compared, for {study.baseline} failed",))
    repeated_outputs = _outputs(study, study.baseline, repeat_files(finished.folder, study.baseline))
    entries = []
    for values, requests in answered_by_labels(finished.workload.requests, labels).items():
        labels_entry = dict(zip(labels, values, strict=True))
        entries += [labels_entry | entry for entry in _entries(study, outputs, repeated_outputs, requests)]
    return Findings({"answers": entries}, tables=(answers_table(entries, list(labels), study.baseline),))


def answered_by_labels(
    requests: Sequence[Request], labels: Mapping[str, Sequence[Label]]
) -> dict[tuple[Label, ...], list[Request]]:
    """Return the requests with a gold answer, by their label values."""
    by_labels: dict[tuple[Label, ...], list[Request]] = {}
    for index, request in enumerate(requests):
        if request.answer is not None:
            by_labels.setdefault(tuple(values[index] for values in labels.values()), []).append(request)
    return by_labels


def _outputs(study: Study, arm: str, files: ArmFiles) -> Outputs:
    """Return the outputs of an arm under the study's first seed; other seeds have the same questions."""
    return read_outputs(files.outputs(arm, cells(study, arm)[0]))


def _entries(
    study: Study, outputs: Mapping[str, Outputs], repeated_outputs: Outputs, requests: Sequence[Request]
) -> list[dict[str, Any]]:
    base, tokenizer = outputs[study.baseline], tokenizer_of(study.workload.tokenizer)
    # Accuracy needs trained weights, and answers that the arm generated itself.
    answers, stop = study.engine.weights != "random" and study.engine.teacher is None, _stop(tokenizer)
    results = []
    for arm, arm_outputs in outputs.items():
        texts = tuple(answer_text(arm_outputs, request, tokenizer) for request in requests) if answers else ()
        divergences = () if arm == study.baseline else _divergences(base, arm_outputs, requests, stop)
        results.append(ArmResult(arm, texts, divergences))
    floor = _divergences(base, repeated_outputs, requests, stop)
    rows = arm_rows(results, [[request.answer or ""] for request in requests], floor, study.baseline)
    entries = [_plain(asdict(row)) for row in rows]
    if study.judge.base_url:
        for entry, result in zip(entries, results, strict=True):
            entry["judge"] = _judge_answers(study.judge, requests, result.answers, tokenizer)
    return entries


def _divergences(
    base: Outputs, arm_outputs: Outputs, requests: Sequence[Request], stop: int | None
) -> tuple[Divergence, ...]:
    """Return the divergence from the baseline of each request, up to the end of its answer.

    Empty where logits were not recorded, or where tokens differ, so that predictions are for different texts.
    """
    divergences = []
    for request in requests:
        base_logits, arm_logits = (outputs.logits.get(request.id) for outputs in (base, arm_outputs))
        tokens = base.tokens[request.id]
        if base_logits is None or arm_logits is None or not np.array_equal(tokens, arm_outputs.tokens[request.id]):
            return ()
        ends = _ends(tokens, stop)
        answered = int(ends[0]) + 1 if len(ends) else len(tokens)
        base_logits, arm_logits = base_logits[:answered], arm_logits[:answered]
        greedy_tokens = [logits.argmax(1).tolist() for logits in (base_logits, arm_logits)]
        divergences.append(divergence(base_logits, arm_logits, greedy_match(*greedy_tokens)))
    return tuple(divergences)


def answer_text(outputs: Outputs, request: Request, tokenizer: ChatTokenizer) -> str:
    """Return the generated text of a request, up to the token that ends the answer."""
    tokens = outputs.tokens[request.id]
    ends = _ends(tokens, _stop(tokenizer))
    return tokenizer.decode(tokens[: ends[0]] if len(ends) else tokens).strip()


def _stop(tokenizer: ChatTokenizer) -> int | None:
    """Return the id of the token that ends an answer, if the tokenizer has one."""
    return None if tokenizer.eos_token is None else tokenizer.tokenizer.token_to_id(tokenizer.eos_token)


def _ends(tokens: NDArray[np.int32], stop: int | None) -> NDArray[np.int64]:
    """Return the positions of the end token; empty where the answer was cut off."""
    return np.empty(0, np.int64) if stop is None else np.flatnonzero(tokens == stop)


def _judge_answers(
    judge: JudgeSettings, requests: Sequence[Request], answers: Sequence[str], tokenizer: ChatTokenizer
) -> dict[str, Any]:
    """Return the judge's mean score over the answers that it scored, and its failures."""
    prompts = [tokenizer.decode(request.tokens) for request in requests]
    cases = zip(prompts, requests, answers, strict=True)
    result = judge_all(judge, [Case(prompt, request.answer or "", answer) for prompt, request, answer in cases])
    mean = float(np.mean(result.scores)) if result.scores else None
    return {"mean": mean, "judged": len(result.scores), "failures": result.failures}


def _plain(value: Any) -> Any:
    """Return the value with intervals as lists, since JSON has no named tuples."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value
