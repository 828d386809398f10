"""Answers of a trained probe when documents are encoded apart: `python hybrid_answers.py weights=FOLDER`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from probe_model import (
    MAMBA_DT,
    Batch,
    Form,
    Memory,
    Shape,
    SpanMemory,
    distances,
    draw,
    encode_apart,
    encode_repaired,
    encode_with_halo,
    forward_logits,
    mixers,
    question_logits,
    slow_decay,
    with_separators,
)
from probe_report import (
    FOLDER,
    SEEN,
    Answers,
    Findings,
    HeadNorm,
    Score,
    StateError,
    answers_table,
    draw_answers,
    draw_norms,
    heads_table,
    norms_table,
    run_program,
    scores,
    state_errors_table,
    write_findings,
)
from probe_settings import HybridAnswers, NormSettings, parse_case
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from spanlab.engine.maps import AffineMap, Transition, exact, heads_above, low_rank, scalar, spectral_norm
from spanlab.study.folder import entry_folder, print_line

# ------------------------------------------------------------------------------
# Retention of a state over a span: norm of the transition and decay, by layer, head and length.
# ------------------------------------------------------------------------------


@torch.no_grad()
def head_norms(model: PreTrainedModel, settings: HybridAnswers) -> Iterator[HeadNorm]:
    """Norms of the same spans under the weights of the model, and under new weights of the same sizes."""
    for source, weights in sources(model, settings.norms, settings.seed):
        for tokens in settings.norms.lengths:
            for layer, (span,) in encode_apart(weights, _spans(model, settings, tokens)).maps.items():
                yield from _heads(source, layer, tokens, span)


def _spans(model: PreTrainedModel, settings: HybridAnswers, tokens: int) -> Tensor:
    """Token ids [N, 1, L]."""
    rng, count = np.random.default_rng([settings.seed, tokens]), settings.norms.spans
    if settings.norms.tokens == "random":
        return torch.from_numpy(rng.integers(model.config.vocab_size, size=(count, 1, tokens)))
    return torch.from_numpy(draw(rng, settings.task, Shape(1, tokens, settings.facts), count).documents)


def sources(model: PreTrainedModel, settings: NormSettings, seed: int) -> Iterator[tuple[str, PreTrainedModel]]:
    """The model, and new ones of its sizes: with transformers' initial weights, and with slow decay."""
    yield "trained", model
    if not (settings.published or settings.slow):
        return
    torch.manual_seed(seed)
    new = type(model)(copy.deepcopy(model.config)).eval()
    if settings.published:
        yield "published", new
    if settings.slow:
        for mixer in mixers(new):
            slow_decay(mixer, MAMBA_DT)
        yield "slow", new


def _heads(source: str, layer: int, tokens: int, span: AffineMap) -> Iterator[HeadNorm]:
    norms, decays = spectral_norm(span.transition).mean(0), span.decay.mean(0)
    ranks = (torch.linalg.svdvals(span.transition) > SEEN).sum(-1).double().mean(0)
    for head, values in enumerate(zip(norms, decays, ranks, strict=True)):
        yield HeadNorm(source, layer, head, tokens, *map(float, values))


# ------------------------------------------------------------------------------
# Errors of composed states relative to the full view, by the context of the first tokens of
# documents.
# ------------------------------------------------------------------------------


@torch.no_grad()
def state_errors(model: PreTrainedModel, settings: HybridAnswers, case: str) -> Iterator[StateError]:
    """Errors of states after the last document, under the same weights as the norms."""
    shape = Shape(*parse_case(case), settings.facts)
    rng = np.random.default_rng([settings.seed, shape.documents, shape.tokens])
    documents = torch.from_numpy(draw(rng, settings.task, shape, settings.norms.spans).documents)
    for source, weights in sources(model, settings.norms, settings.seed):
        for arm, composed, full in _memories(weights, documents, settings):
            for layer, state in full.recurrent.items():
                yield StateError(source, arm, layer, float(distances(composed.recurrent[layer], state).mean()))


def _memories(
    model: PreTrainedModel, documents: Tensor, settings: HybridAnswers
) -> Iterator[tuple[str, Memory, Memory]]:
    """Arms, with their memory and the memory of the full view of the same tokens."""
    full, halo = _state_errors_full_view(model, documents), mixers(model)[0].conv_kernel_size - 1
    yield "exact", encode_apart(model, documents).assembled(exact), full
    for tokens in settings.repaired:
        yield f"exact, first {tokens} again", encode_repaired(model, documents, tokens, exact), full
    yield "exact, halo", encode_with_halo(model, documents, halo).assembled(exact), full
    if settings.separator:
        marked = with_separators(documents, settings.separator)
        yield "exact, separator", encode_apart(model, marked).assembled(exact), _state_errors_full_view(model, marked)


def _state_errors_full_view(model: PreTrainedModel, documents: Tensor) -> Memory:
    return encode_apart(model, documents.flatten(1)[:, None]).assembled(exact)


# ------------------------------------------------------------------------------
# Answers of one model by arm: arms differ only in the memory of the documents that questions
# read.
# ------------------------------------------------------------------------------

FULL_VIEW, EXACT = "full view", "exact"  # the reference arms


@dataclass(frozen=True)
class Case:
    """Documents and questions of one batch; the documents are encoded apart once for all arms."""

    model: PreTrainedModel
    documents: Tensor
    questions: Tensor

    @cached_property
    def spans(self) -> SpanMemory:
        """Memory of the documents, each encoded alone."""
        return encode_apart(self.model, self.documents)


Arm = Callable[[Case], Tensor]
"""Logits [N, Q, vocabulary] of a case."""


def forms(settings: HybridAnswers) -> dict[str, Form]:
    """Storage forms of the transition of a document, by name."""
    ranks: dict[str, Form] = {f"rank {rank}": partial(low_rank, rank=rank) for rank in settings.ranks}
    drops: dict[str, Form] = {f"norm > {norm:g}": partial(heads_above, norm=norm) for norm in settings.drop}
    return {
        EXACT: exact,
        "exact, bf16": partial(exact, dtype=torch.bfloat16),
        **ranks,
        **drops,
        "decay only": lambda span: _scaled(span, span.decay),
        "sum": lambda span: _scaled(span, torch.ones_like(span.decay)),
        "last": lambda span: _scaled(span, torch.zeros_like(span.decay)),
    }


def _scaled(span: AffineMap, factor: Tensor) -> Transition:
    return scalar(factor, span.transition.shape[-1])


def arms(settings: HybridAnswers) -> dict[str, Arm]:
    """All arms by name, the references first."""
    assembled: dict[str, Arm] = {name: partial(_assembled, form=form) for name, form in forms(settings).items()}
    return {
        FULL_VIEW: _answers_full_view,
        "attention in blocks": lambda case: forward_logits(case.model, case.documents, case.questions, "blocks"),
        **assembled,
        **_boundaries(settings),
        "state only": lambda case: question_logits(
            case.model, case.spans.assembled(exact).without_kv(), case.questions
        ),
        "first state": lambda case: question_logits(
            case.model, case.spans.assembled(exact).with_first_state(), case.questions
        ),
        "KV only": lambda case: question_logits(case.model, case.spans.base.without_state(), case.questions),
        "no documents": lambda case: question_logits(
            case.model, case.spans.base.without_state().without_kv(), case.questions
        ),
    }


def _boundaries(settings: HybridAnswers) -> dict[str, Arm]:
    """Arms that change the start of documents: a separator, a halo, or recomputed first tokens."""
    repaired = {f"exact, first {tokens} again": partial(_repaired, tokens=tokens) for tokens in settings.repaired}
    if not settings.separator:
        return {**repaired, "exact, halo": _with_halo}
    return {
        **repaired,
        "exact, halo": _with_halo,
        "exact, separator": lambda case: _assembled(_separated(case, settings.separator), exact),
        "full view, separator": lambda case: _answers_full_view(_separated(case, settings.separator)),
    }


def _repaired(case: Case, tokens: int) -> Tensor:
    return question_logits(case.model, encode_repaired(case.model, case.documents, tokens, exact), case.questions)


def _with_halo(case: Case) -> Tensor:
    """Logits with a halo of the tokens that the convolution sees before the first token."""
    halo = mixers(case.model)[0].conv_kernel_size - 1
    return question_logits(
        case.model, encode_with_halo(case.model, case.documents, halo).assembled(exact), case.questions
    )


def _separated(case: Case, tokens: int) -> Case:
    return Case(case.model, with_separators(case.documents, tokens), case.questions)


def _answers_full_view(case: Case) -> Tensor:
    return forward_logits(case.model, case.documents, case.questions)


def _assembled(case: Case, form: Form) -> Tensor:
    return question_logits(case.model, case.spans.assembled(form), case.questions)


@torch.no_grad()
def answer(model: PreTrainedModel, settings: HybridAnswers, documents: int, tokens: int) -> dict[str, Answers]:
    """Answers of every arm to the same sequences; ValueError if documents are shorter than the convolution."""
    kernel = mixers(model)[0].conv_kernel_size
    if tokens < kernel:
        expected = f"expected documents of {kernel} tokens or more, as many as the convolution sees"
        raise ValueError(f"cases={documents}x{tokens}: {expected}")
    rng, shape = np.random.default_rng([settings.seed, documents, tokens]), Shape(documents, tokens, settings.facts)
    batch = draw(rng, settings.task, shape, settings.sequences)
    first = next(_cases(model, batch, settings.batch)).spans
    nbytes = {name: _bytes(first, form) for name, form in forms(settings).items()}
    arms_by_name = arms(settings)
    logits = [
        [arm(case).log_softmax(-1) for arm in arms_by_name.values()] for case in _cases(model, batch, settings.batch)
    ]
    by_arm = zip(arms_by_name, map(torch.cat, zip(*logits, strict=True)), strict=True)
    return {name: _scored(arm_logits, batch, nbytes.get(name)) for name, arm_logits in by_arm}


def _cases(model: PreTrainedModel, batch: Batch, size: int) -> Iterator[Case]:
    documents, questions = torch.from_numpy(batch.documents), torch.from_numpy(batch.questions)
    for document_batch, question_batch in zip(documents.split(size), questions.split(size), strict=True):
        yield Case(model, document_batch, question_batch)


def _bytes(spans: SpanMemory, form: Form) -> int:
    """Mean bytes of the transitions of one document."""
    maps = [span for layer in spans.maps.values() for span in layer]
    sequences, documents = len(maps[0].state), len(maps) // len(spans.maps)
    return sum(form(span).nbytes for span in maps) // (sequences * documents)


def _scored(logits: Tensor, batch: Batch, nbytes: int | None) -> Answers:
    gold = torch.from_numpy(batch.gold)
    loss = -logits.gather(-1, gold[..., None])[..., 0].double().numpy()
    return Answers((logits.argmax(-1) == gold).numpy(), loss, batch.updated, batch.first, nbytes)


# ------------------------------------------------------------------------------
# The entry `hybrid_answers`: answers of a trained probe when documents are encoded separately.
# ------------------------------------------------------------------------------


def run_hybrid_answers(settings: HybridAnswers, run: str, root: Path) -> Path:
    """Answer all cases, measure norms, write a run folder, and return the folder."""
    import torch
    from probe_model import load

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


if __name__ == "__main__":
    run_program(HybridAnswers, run_hybrid_answers)
