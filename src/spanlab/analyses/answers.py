"""The table of the analysis `answers`: a row for each arm and combination of labels."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.base import Findings, Finished
from spanlab.core.request import Request
from spanlab.judge import Case, judge_all
from spanlab.queries.render import ChatTokenizer
from spanlab.report.table import Field, Table, count, estimate, percent_interval, tabulate, word
from spanlab.settings.analyses import ANALYSES, LABELS, MEASURED, REPEAT, Analysis, AnswerSettings
from spanlab.settings.study import Study
from spanlab.stats import (
    POSITIVE,
    SHARE,
    Interval,
    Kind,
    McNemar,
    mcnemar,
    mean_interval,
    share_interval,
)
from spanlab.study.jobs import run_cells
from spanlab.study.machine import repeat_files
from spanlab.study.numbers import ArmFiles, Outputs, read_outputs
from spanlab.workloads.queries import tokenizer_of

Entry = dict[str, Any]

_ACCURACY = (("exact", "exact\nmatch"), ("stated", "answer\nstated"), ("f1", "token\nF1"))
_NOTES = (
    "KL = mean over the answer's tokens of KL({baseline} ‖ arm), nats; top-1 = tokens with the same likeliest next "
    "token; greedy = answers that are equal under greedy decoding; all after the tokens that {baseline} chose",
    "floor = {baseline} against its own repeat; [a, b] = 95 % interval over questions; answer stated = the gold "
    "answer, and no other number where it is a number",
)


def answers_table(entries: Sequence[Entry], labels: Sequence[str], baseline: str) -> Table:
    """Return accuracy where answers were scored, and agreement with the baseline where logits were
    stored."""
    scored = any(entry["accuracy"] for entry in entries)
    compared = any(entry["agreement"] for entry in entries)
    divergence = estimate(
        lambda value, ends: (
            f"{value:.3g}" if ends is None else f"{value:.3g} [{ends[0]:.2g}, {ends[1]:.2g}]"
        )
    )
    fields = (
        Field("arm", "arm", word, left=True),
        *(Field(label, label, lambda value: word(str(value)), left=True) for label in labels),
        Field("questions", "questions", count, "n"),
        *(
            Field(key, heading if scored else "", percent_interval, f"accuracy.{key}")
            for key, heading in _ACCURACY
        ),
        Field("kl", "KL" if compared else "", divergence, "agreement.kl"),
        Field("kl_floor", "floor\nof KL" if compared else "", divergence, "floor.kl"),
        *(
            Field(key, key if compared else "", percent_interval, f"agreement.{key}")
            for key in ("top1", "greedy")
        ),
    )
    notes = [note.format(baseline=baseline) for note in _NOTES]
    return tabulate("answers", "Answers and predictions of every arm", fields, entries, notes)


# ------------------------------------------------------------------------------
# Scores of a generated answer against gold answers: normalised exact match, stated, token F1.
# ------------------------------------------------------------------------------

Score = Callable[[str, str], float]

_ARTICLES = frozenset({"a", "an", "the"})
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_APOSTROPHES = re.compile(r"(?<=\w)['\u2019](?=\w)")
# A run of letters and digits. A point between digits does not end it; a sign or point before it
# belongs to the number.
_TOKEN = re.compile(r"(?:(?<![\w.])-?\.?(?=\d))?[^\W_]+(?:(?<=\d)\.(?=\d)[^\W_]+)*")
_NUMBER = re.compile(r"-?\.?\d[\d.]*")


def normalised(text: str) -> list[str]:
    """Return the tokens of a text in lower case, without punctuation, and without articles if other
    tokens remain.

    As in SQuAD's evaluation, except that numbers stay whole: "1,000" is one token, "4.5" is not
    "45", "-5" is not "5".
    """
    plain = unicodedata.normalize("NFKC", text).lower().replace("\u2212", "-")
    ungrouped = _GROUPED.sub(lambda number: number[0].replace(",", ""), plain)
    tokens: list[str] = _TOKEN.findall(_APOSTROPHES.sub("", ungrouped))
    return [token for token in tokens if token not in _ARTICLES] or tokens


def exact_match(answer: str, gold: str) -> float:
    """Return 1 if both texts normalise to the same tokens, else 0."""
    return float(normalised(answer) == _gold_tokens(gold))


def stated(answer: str, gold: str) -> float:
    """Return 1 if the answer contains gold's tokens in sequence and, for a gold number, no other
    number; else 0.

    For models that answer in a sentence. An answer that lists several numbers does not score.
    """
    tokens, gold_tokens = normalised(answer), _gold_tokens(gold)
    if _numbers(gold_tokens) and not _numbers(tokens) <= _numbers(gold_tokens):
        return 0.0
    starts = range(len(tokens) - len(gold_tokens) + 1)
    return float(any(tokens[start : start + len(gold_tokens)] == gold_tokens for start in starts))


def token_f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over bags of tokens, 0 to 1 (SQuAD,
    Rajpurkar et al. 2016)."""
    answer_counts, gold_counts = Counter(normalised(answer)), Counter(_gold_tokens(gold))
    common = (answer_counts & gold_counts).total()
    return 2 * common / (answer_counts.total() + gold_counts.total())


def best_score(score: Score, answer: str, golds: Sequence[str]) -> float:
    """Return the highest score over several equally valid gold answers."""
    if not golds:
        raise ValueError("golds=[]: expected at least one gold answer")
    return max(score(answer, gold) for gold in golds)


def _gold_tokens(gold: str) -> list[str]:
    tokens = normalised(gold)
    if not tokens:
        raise ValueError(f"gold={gold!r}: expected an answer with at least one letter or digit")
    return tokens


def _numbers(tokens: Sequence[str]) -> set[str]:
    return {token for token in tokens if _NUMBER.fullmatch(token)}


# ------------------------------------------------------------------------------
# Divergence between a model's predictions under full recompute and under another way of
# computing the prompt.
# ------------------------------------------------------------------------------

Logits = NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Divergence:
    """One prompt's divergence from its reference, over the predictions of the same answer tokens.

    `kl`      mean of KL(reference ‖ other) over the predictions, nats.
    `top1`    share of predictions whose likeliest token is the same.
    `greedy`  whether greedy decoding gave the same tokens; None where nothing was decoded.
    """

    predictions: int
    kl: float
    top1: float
    greedy: bool | None = None


def divergence(reference: Logits, other: Logits, greedy: bool | None = None) -> Divergence:
    """Compare two [T, V] logits of one prompt, row t of both predicting after the same T tokens of
    text.

    Feed both arms the reference's tokens (teacher forcing), otherwise their predictions are for
    different texts.
    """
    kl, same = kl_rows(reference, other), top1_rows(reference, other)
    return Divergence(len(kl), float(kl.mean()), float(same.mean()), greedy)


def kl_rows(reference: Logits, other: Logits) -> NDArray[np.float64]:
    """Return KL(p ‖ q) = Σ p · (log p − log q) per row, nats, float64, shape [T]; p is the
    reference.

    Inputs are [T, V] logits of any float kind; the softmax is taken in float64 with the row's
    maximum subtracted.
    """
    _check(reference, other)
    rows = []
    for p, q in zip(reference, other, strict=True):
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        kl = float(np.exp(log_p) @ (log_p - log_q))
        assert math.isfinite(kl), "logits that a float32 holds have a finite divergence"
        rows.append(max(0.0, kl))  # KL is never negative (Gibbs), but rounding can make it so
    return np.array(rows)


def top1_rows(reference: Logits, other: Logits) -> NDArray[np.bool_]:
    """Return whether each row has its largest logit at the same index, shape [T]; ties count by the
    first index."""
    _check(reference, other)
    same: NDArray[np.bool_] = reference.argmax(axis=1) == other.argmax(axis=1)
    return same


def greedy_match(reference: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two greedy decodings are equal in all tokens."""
    return list(reference) == list(other)


def _log_softmax(row: Logits) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = row.astype(np.float64) - float(row.max())
    normaliser: np.float64 = np.log(np.exp(shifted).sum())
    return shifted - normaliser


def _check(reference: Logits, other: Logits) -> None:
    for name, logits in (("reference", reference), ("other", other)):
        if logits.ndim != 2 or not logits.size:
            raise ValueError(
                f"{name} logits have shape {logits.shape}, expected [tokens, vocabulary], both from 1 up"
            )
        bad = ~np.isfinite(logits).all(axis=1)
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(
                f"{name} logits hold NaN or infinity, first in row {row}, expected finite numbers"
            )
    if reference.shape != other.shape:
        raise ValueError(
            f"other logits have shape {other.shape}, expected {reference.shape} as the reference has"
        )


# ------------------------------------------------------------------------------
# Answers and divergences of each arm as one row, with the noise floor of full recompute against
# itself.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArmResult:
    """Results of one arm for the prompts of a study, in their order.

    `answers`      generated texts; empty where accuracy is not measured (random weights).
    `divergences`  from full recompute (M0), one per prompt; empty where none were measured.
    """

    arm: str
    answers: tuple[str, ...] = ()
    divergences: tuple[Divergence, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Closeness to full recompute: means over prompts with 95 % bootstrap intervals; KL in nats per
    prediction."""

    kl: Interval
    top1: Interval
    greedy: Interval | None  # None unless every prompt was decoded


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of right answers with exact 95 % intervals, mean token F1, and the test against the
    reference arm."""

    exact: Interval
    stated: Interval
    f1: Interval
    against_reference: McNemar  # on `stated`; first is the reference arm


@dataclass(frozen=True, slots=True)
class ArmRow:
    """One arm of the table; None marks an unmeasured value. `floor` is M0 against M0, the same in
    every row."""

    arm: str
    n: int
    accuracy: Accuracy | None
    agreement: Agreement | None
    floor: Agreement | None


def arm_rows(
    arms: Sequence[ArmResult],
    golds: Sequence[Sequence[str]],
    floor: Sequence[Divergence],
    reference: str = "M0",
) -> list[ArmRow]:
    """Return one row per arm, in the order given.

    `golds`      the prompts' gold answers; a prompt may have several.
    `floor`      divergences of a second full recompute from the first: noise of the device alone;
                 may be empty.
    `reference`  the arm that McNemar's test compares with.
    """
    floor_agreement = _agreement(floor)
    for arm in arms:
        prompts = len(golds)
        for name, values in (("answers", arm.answers), ("divergences", arm.divergences)):
            if values and len(values) != prompts:
                raise ValueError(
                    f"{arm.arm}.{name}: {len(values)} of them, expected one for each of {prompts} prompts"
                )
    reference_correct = next(
        (_correct_answers(arm, golds) for arm in arms if arm.arm == reference and arm.answers), None
    )
    if reference_correct is None and any(arm.answers for arm in arms):
        raise ValueError(
            f"reference={reference}: expected an arm with answers among {[arm.arm for arm in arms]}"
        )
    rows = []
    for arm in arms:
        accuracy = None
        if arm.answers and reference_correct is not None:
            pairs = list(zip(arm.answers, golds, strict=True))
            exact = sum(int(best_score(exact_match, answer, gold)) for answer, gold in pairs)
            correct = _correct_answers(arm, golds)
            accuracy = Accuracy(
                exact=share_interval(exact, len(pairs)),
                stated=share_interval(sum(correct), len(pairs)),
                f1=_mean([best_score(token_f1, answer, gold) for answer, gold in pairs], SHARE),
                against_reference=mcnemar(reference_correct, correct),
            )
        divergences = _agreement(arm.divergences)
        rows.append(ArmRow(arm.arm, len(golds), accuracy, divergences, floor_agreement))
    return rows


def _correct_answers(arm: ArmResult, golds: Sequence[Sequence[str]]) -> list[bool]:
    return [
        best_score(stated, answer, gold) == 1
        for answer, gold in zip(arm.answers, golds, strict=True)
    ]


def _agreement(divergences: Sequence[Divergence]) -> Agreement | None:
    if not divergences:
        return None
    decoded = [divergence.greedy for divergence in divergences if divergence.greedy is not None]
    return Agreement(
        kl=_mean([divergence.kl for divergence in divergences], POSITIVE),
        top1=_mean([divergence.top1 for divergence in divergences], SHARE),
        greedy=share_interval(sum(decoded), len(decoded))
        if len(decoded) == len(divergences)
        else None,
    )


def _mean(values: Sequence[float], kind: Kind) -> Interval:
    """Return the mean over prompts with its 95 % interval; a prompt is one cluster."""
    sample = np.array(values, dtype=np.float64)
    if not np.isfinite(sample).all():
        raise ValueError(f"values={values}: expected finite numbers")
    return mean_interval(sample, np.arange(len(sample)), kind)


# ------------------------------------------------------------------------------
# The analysis `answers`: divergence of each arm's predictions from the baseline's, and accuracy
# of its answers.
#
# The baseline recomputes everything. With `engine.teacher=baseline` all arms predict after the
# same tokens, as divergence requires. With null each arm generates an answer, as accuracy
# requires.
# ------------------------------------------------------------------------------

Label = str | int


def score_answers(finished: Finished) -> Findings:
    """Return one entry per arm and combination of labels, over the requests with a gold answer."""
    study, labels = finished.study, finished.workload.labels
    outputs = {arm: _outputs(study, arm, files) for arm, files in finished.files.items()}
    if study.runs.baseline not in outputs:
        return Findings(
            {"answers": []}, caveats=(f"no answers are compared, for {study.runs.baseline} failed",)
        )
    repeated_outputs = _outputs(
        study, study.runs.baseline, repeat_files(finished.folder, study.runs.baseline)
    )
    entries = []
    for values, requests in answered_by_labels(finished.workload.requests, labels).items():
        labels_entry = dict(zip(labels, values, strict=True))
        entries += [
            labels_entry | entry for entry in _entries(study, outputs, repeated_outputs, requests)
        ]
    return Findings(
        {"answers": entries}, tables=(answers_table(entries, list(labels), study.runs.baseline),)
    )


def answered_by_labels(
    requests: Sequence[Request], labels: Mapping[str, Sequence[Label]]
) -> dict[tuple[Label, ...], list[Request]]:
    """Return the requests with a gold answer, by their label values."""
    by_labels: dict[tuple[Label, ...], list[Request]] = {}
    for index, request in enumerate(requests):
        if request.answer is not None:
            by_labels.setdefault(tuple(values[index] for values in labels.values()), []).append(
                request
            )
    return by_labels


def _outputs(study: Study, arm: str, files: ArmFiles) -> Outputs:
    """Return the outputs of an arm under the study's first seed; other seeds have the same
    questions."""
    return read_outputs(files.outputs(arm, run_cells(study, arm)[0]))


def _entries(
    study: Study,
    outputs: Mapping[str, Outputs],
    repeated_outputs: Outputs,
    requests: Sequence[Request],
) -> list[dict[str, Any]]:
    base, tokenizer = outputs[study.runs.baseline], tokenizer_of(study.workload.tokenizer)
    # Accuracy needs trained weights, and answers that the arm generated itself.
    answers = study.engine.weights != "random" and study.engine.teacher is None
    stop = _stop(tokenizer)
    results = []
    for arm, arm_outputs in outputs.items():
        texts = (
            tuple(answer_text(arm_outputs, request, tokenizer) for request in requests)
            if answers
            else ()
        )
        divergences = (
            () if arm == study.runs.baseline else _divergences(base, arm_outputs, requests, stop)
        )
        results.append(ArmResult(arm, texts, divergences))
    floor = _divergences(base, repeated_outputs, requests, stop)
    rows = arm_rows(
        results, [[request.answer or ""] for request in requests], floor, study.runs.baseline
    )
    entries = [_plain(asdict(row)) for row in rows]
    judge = study.analyses.answers.judge
    if judge.base_url:
        prompts = [tokenizer.decode(request.tokens) for request in requests]
        for entry, result in zip(entries, results, strict=True):
            cases = zip(prompts, requests, result.answers, strict=True)
            judged = judge_all(
                judge, [Case(prompt, request.answer or "", text) for prompt, request, text in cases]
            )
            entry["judge"] = {
                "mean": float(np.mean(judged.scores)) if judged.scores else None,
                "judged": len(judged.scores),
                "failures": judged.failures,
            }
    return entries


def _divergences(
    base: Outputs, arm_outputs: Outputs, requests: Sequence[Request], stop: int | None
) -> tuple[Divergence, ...]:
    """Return the divergence from the baseline of each request, up to the end of its answer.

    Empty where logits were not recorded, or where tokens differ, so that predictions are for
    different texts.
    """
    divergences = []
    for request in requests:
        base_logits, arm_logits = (
            outputs.logits.get(request.id) for outputs in (base, arm_outputs)
        )
        tokens = base.tokens[request.id]
        if (
            base_logits is None
            or arm_logits is None
            or not np.array_equal(tokens, arm_outputs.tokens[request.id])
        ):
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
    return (
        None
        if tokenizer.eos_token is None
        else tokenizer.tokenizer.token_to_id(tokenizer.eos_token)
    )


def _ends(tokens: NDArray[np.int32], stop: int | None) -> NDArray[np.int64]:
    """Return the positions of the end token; empty where the answer was cut off."""
    return np.empty(0, np.int64) if stop is None else np.flatnonzero(tokens == stop)


def _plain(value: Any) -> Any:
    """Return the value with intervals as lists, since JSON has no named tuples."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _check_study(study: Study) -> None:
    """Raise ValueError for answers that are not recorded, and for a judge of others' answers."""
    engine = study.engine
    if engine.record not in ("tokens", "logits"):
        raise ValueError(
            f"analyses=answers with engine.record={engine.record}: expected tokens or logits"
        )
    if engine.weights == "random" and engine.record == "tokens":
        raise ValueError(
            "engine.record=tokens with engine.weights=random: expected logits, or trained weights"
        )
    address = study.analyses.answers.judge.base_url
    if address and (engine.teacher is not None or engine.weights == "random"):
        answers = f"engine.teacher={engine.teacher}, engine.weights={engine.weights}"
        expected = "expected engine.teacher=null and trained weights"
        raise ValueError(f"judge.base_url={address} with {answers}: {expected}")


ANALYSES.add(
    Analysis(
        "answers",
        score_answers,
        needs=(MEASURED, REPEAT, LABELS),
        options=AnswerSettings,
        check=_check_study,
    )
)
