"""Selection of the served requests of a corpus: the same rules, in the same order, for every
source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Request, Span
from spanlab.core.token_string import IdRun, Tokens, cut_ids
from spanlab.workloads.workload import Corpus, FreshIds, Joints, Provenance, Row, Workload

DEFAULT_OUTPUT_TOKENS = 64
TOO_LONG = ("cut", "drop")


@dataclass(frozen=True, slots=True)
class Selection:
    """Limits that select requests of a corpus.

    `documents`               the first n groups that fit; None takes all.
    `questions_per_document`  the first n requests of each group; None takes all.
    `max_prompt_tokens`       longest prompt; None means no limit.
    `too_long`                "cut" shortens the document span from its end, by the same amount for
                              all its selected questions, and drops it if nothing would remain;
                              "drop" drops the document.
    `output_tokens`           output length of all requests; None takes the gold answer's, or
                              `unknown_output`.
    `documents_per_prompt`    documents per prompt: each gets an equal share of the limit minus the
                              longest opening and question, so that it is cut to the same length in
                              all its prompts.
    """

    documents: int | None = None
    questions_per_document: int | None = None
    max_prompt_tokens: int | None = None
    too_long: str = "cut"
    output_tokens: int | None = None
    unknown_output: int = DEFAULT_OUTPUT_TOKENS
    documents_per_prompt: int = 1


def select(corpus: Corpus, selection: Selection) -> Workload:
    """Select requests and make their token ids; raise ValueError if no request remains."""
    selected: list[_SelectedRow] = []
    groups = cut = dropped = 0
    limits = _DocumentLimits(corpus, selection)
    for members in _groups(corpus).values():
        if groups == selection.documents:
            break
        fitting, shortened, too_long = _fit(limits, members[: selection.questions_per_document])
        selected += fitting
        cut += shortened
        dropped += too_long
        groups += bool(fitting)
    if not selected:
        raise ValueError(
            f"workload.max_prompt_tokens={selection.max_prompt_tokens} leaves nothing of {corpus.name}; "
            f"expected a limit that fits at least one document"
        )
    check_documents(selection, groups, corpus.name)
    requests = _requests(corpus, sorted(selected), selection)
    detail = corpus.detail.replace("{documents}", str(groups)).replace(
        "{requests}", str(len(requests))
    )
    return Workload(corpus.name, requests, Provenance(corpus.kind, detail, cut, dropped))


def check_documents(selection: Selection, available: int, name: str) -> None:
    """Reject a selection of more documents than are available."""
    if selection.documents is not None and selection.documents > available:
        fitting = (
            "" if selection.max_prompt_tokens is None else " that fit workload.max_prompt_tokens"
        )
        raise ValueError(
            f"workload.documents={selection.documents}; expected at most {available}, the documents of {name}{fitting}"
        )


class _SelectedRow(NamedTuple):
    """A selected row: its number in the corpus, the span of its document, and the document's
    length.

    The length is per row, because the limit may cut a document to different lengths in different
    groups. Without a limit, no span is looked at: `document` is None.
    """

    row: int
    document: int | None = None
    length: int = 0


def _groups(corpus: Corpus) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(corpus.groups or [row.group_id for row in corpus.rows]):
        groups.setdefault(group, []).append(index)
    return groups


def _fit(limits: _DocumentLimits, members: list[int]) -> tuple[list[_SelectedRow], int, int]:
    """Apply the length limit to one group; return its fitting rows and the numbers of cut and
    dropped documents."""
    corpus = limits.corpus
    if (most := limits.selection.max_prompt_tokens) is None:
        return [_SelectedRow(row) for row in members], 0, 0
    fitting: list[_SelectedRow] = []
    cut = dropped = 0
    documents: dict[int, list[int]] = {}
    for index in members:
        documents.setdefault(_document_span(corpus, corpus.rows[index]), []).append(index)
    for document, rows in documents.items():
        length = int(corpus.lengths[document])
        limit = limits.of(most, rows)
        if limit < length and (limits.selection.too_long == "drop" or limit < 1):
            dropped += 1
            continue
        cut += limit < length
        fitting += [_SelectedRow(row, document, min(limit, length)) for row in rows]
    return fitting, cut, dropped


@dataclass(frozen=True)
class _DocumentLimits:
    """Largest document lengths under the length limit of the prompt."""

    corpus: Corpus
    selection: Selection

    def of(self, limit: int, rows: list[int]) -> int:
        """Return the tokens of a document that fit in the longest of its prompts."""
        documents = self.selection.documents_per_prompt
        other_tokens = (
            max(map(self._other_tokens, rows)) if documents == 1 else self._most_other_tokens
        )
        return (limit - other_tokens) // documents

    def _other_tokens(self, row: int) -> int:
        """Return the tokens of a prompt outside its document."""
        spans = self.corpus.rows[row].spans
        document = _document_span(self.corpus, self.corpus.rows[row])
        return int(self.corpus.lengths[list(spans)].sum() - self.corpus.lengths[document])

    @cached_property
    def _most_other_tokens(self) -> int:
        """Largest number of tokens outside the document, over all prompts that may be served."""
        # A later document can replace a dropped one, so all documents count.
        count = None if self.selection.too_long == "drop" else self.selection.documents
        groups = list(_groups(self.corpus).values())[:count]
        return max(
            self._other_tokens(row)
            for rows in groups
            for row in rows[: self.selection.questions_per_document]
        )


def _document_span(corpus: Corpus, row: Row) -> int:
    """Return the span that a length limit may shorten: the first reusable one, or the last if none
    is reusable."""
    return next((span for span in row.spans if corpus.reusable[span]), row.spans[-1])


def _with_spans(
    corpus: Corpus, rows: Sequence[_SelectedRow]
) -> Iterator[tuple[Row, tuple[Span, ...]]]:
    """Yield each row with its spans; all rows share one object per span, and one per length of a
    cut document.

    Text that a source knows by runs of ids has one span for as long as they continue.
    """

    @cache
    def run_of(first: int, length: int) -> Span:
        return Span(IdRun(first, length))

    if corpus.runs_of is not None and all(row.document is None for row in rows):
        whole_rows = [row.row for row in rows]
        for number, runs in zip(whole_rows, corpus.runs_of(whole_rows), strict=True):
            yield corpus.rows[number], tuple([run_of(*run) for run in runs])
        return
    lengths, whole, cut = corpus.lengths.tolist(), set[int](), set[tuple[int, int]]()
    for row in rows:
        numbers = corpus.rows[row.row].spans
        if row.document is not None and row.length < lengths[row.document]:
            cut.add((row.document, row.length))
            numbers = tuple([number for number in numbers if number != row.document])
        whole.update(numbers)
    # Lengths ascend, so the dictionary keeps the longest one of each span.
    counts = dict(sorted(cut)) | {span: lengths[span] for span in whole}
    tokens = corpus.expand(dict(sorted(counts.items())))
    independent, reusable = corpus.independent.tolist(), corpus.reusable.tolist()

    @cache
    def made_of(span: int, length: int) -> Span:
        return Span(cut_ids(tokens[span], 0, length), independent[span], reusable[span])

    for row in rows:
        spans, first, size = list[Span](), 0, 0  # the run that is open has `size` ids
        of_corpus = corpus.rows[row.row]
        for number in of_corpus.spans:
            ids, length = tokens[number], row.length if number == row.document else lengths[number]
            run = (
                None
                if independent[number] or reusable[number] or not isinstance(ids, IdRun)
                else ids
            )
            if run is not None and size and run.first == first + size:
                size += length
                continue
            if size:
                spans.append(run_of(first, size))
            first, size = (0, 0) if run is None else (run.first, length)
            if run is None:
                spans.append(made_of(number, length))
        yield of_corpus, ((*spans, run_of(first, size)) if size else tuple(spans))


def _requests(
    corpus: Corpus, selected_rows: Sequence[_SelectedRow], selection: Selection
) -> tuple[Request, ...]:
    numbers: dict[int, int] = {}
    after = _awaited(corpus, [selected.row for selected in selected_rows])
    return tuple(
        Request(
            id=number,
            group_id=numbers.setdefault(row.group_id, len(numbers)),
            spans=spans,
            output_len=selection.output_tokens or row.output_len or selection.unknown_output,
            arrived_at=0 if corpus.arrived_at is None else corpus.arrived_at[index],
            answer=row.answer,
            wait_ns=0 if corpus.waits_ns is None else corpus.waits_ns[index],
            after=after.get(index, ()),
        )
        for number, (index, (row, spans)) in enumerate(
            zip(
                [selected.row for selected in selected_rows],
                _with_spans(corpus, selected_rows),
                strict=True,
            )
        )
    )


def _awaited(corpus: Corpus, rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the numbers of the requests that each row waits for; a row that is left out is awaited
    by none."""
    if corpus.after is None:
        return {}
    numbers = {row: number for number, row in enumerate(rows)}
    awaited: dict[int, frozenset[int]] = {}
    for row in range(max(rows, default=-1) + 1):  # rows wait for earlier ones
        others = [
            frozenset({numbers[other]}) if other in numbers else awaited[other]
            for other in corpus.after[row]
        ]
        awaited[row] = frozenset().union(*others)
    return {row: tuple(sorted(awaited[row])) for row in numbers}


# ------------------------------------------------------------------------------
# Arrangement of several documents in a prompt, with the question after or before them.
# ------------------------------------------------------------------------------

Ints = NDArray[np.int64]

SEED = 20251122
POSITIONS = ("after", "before")

#: Order of a prompt's documents, given the question's document and the other documents as drawn.
ORDERS: dict[str, Callable[[int, Ints, np.random.Generator], Ints]] = {
    "shuffled": lambda document, distractors, rng: rng.permutation(
        np.append(distractors, document)
    ),
    "fixed": lambda document, distractors, rng: np.sort(np.append(distractors, document)),
    "own_first": lambda document, distractors, rng: np.append(document, distractors),
    "own_last": lambda document, distractors, rng: np.append(distractors, document),
}
DEFAULT_ORDER = "shuffled"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Number and order of a prompt's documents, and the position of its question.

    `documents`  documents of each prompt: the question's document and others of the workload, drawn
                 at random.
    `order`      shuffled: a new order for each prompt; fixed: the order of the workload; own_first
                 or own_last: the question's document first or last, the others as drawn. None:
                 shuffled if there are several.
    `question`   after the documents, or before them.
    """

    documents: int = 1
    order: str | None = None
    question: str = "after"

    def __post_init__(self) -> None:
        if self.documents < 1:
            raise ValueError(
                f"workload.documents_per_prompt={self.documents}: expected a whole number from 1 up"
            )
        if self.order is not None and self.documents == 1:
            raise ValueError(
                f"workload.documents_order={self.order} with workload.documents_per_prompt=1: expected null"
            )

    @property
    def is_plain(self) -> bool:
        """Whether prompts are unchanged: one document, then its question."""
        return self.documents == 1 and self.question == "after"

    def key(self) -> str:
        """Return the setting that changes the arrangement, for error messages."""
        if self.documents > 1:
            return f"workload.documents_per_prompt={self.documents}"
        return f"workload.question_position={self.question}"

    def joining_tokens(self, joints: Joints) -> int:
        """Return the largest number of tokens that the arrangement adds to a prompt."""
        return (
            0
            if self.is_plain
            else len(joints.separator) * (self.documents + (self.question == "before"))
        )

    def line(self) -> str:
        """Return a description of the arrangement for the provenance."""
        documents = [f"{self.documents} documents a prompt, {self.order or DEFAULT_ORDER}"]
        question = ["question before the documents"]
        return ", ".join(documents * (self.documents > 1) + question * (self.question == "before"))


class _Prompt(NamedTuple):
    """Parts of a prompt with one document: spans before it, the document, and the tokens of its
    question."""

    opening: tuple[Span, ...]
    document: Span
    question: Tokens


def arranged(workload: Workload, arrangement: Arrangement, joints: Joints) -> Workload:
    """Return the workload with documents and questions arranged; ValueError unless each prompt has
    one document."""
    if arrangement.is_plain:
        return workload
    prompts = []
    for request in workload.requests:
        index = _document_index(request, arrangement.key(), workload.name)
        question = np.concatenate([span.tokens for span in request.spans[index + 1 :]])
        prompts.append(_Prompt(request.spans[:index], request.spans[index], question))
    documents, numbers_of_prompts = _distinct([prompt.document for prompt in prompts])
    if arrangement.documents > len(documents):
        raise ValueError(
            f"{arrangement.key()}: expected at most {len(documents)}, the documents of {workload.name} that are served"
        )
    separated = []
    for document in documents:
        tokens = np.concatenate([document.tokens, joints.separator])
        # several documents in a prompt are independent of their order
        independent = document.independent or arrangement.documents > 1
        separated.append(replace(document, ids=tokens, independent=independent))
    # The drawn documents do not depend on the order, which has a random stream of its own.
    rng, order_rng = (np.random.default_rng([SEED, stream]) for stream in range(2))
    order = ORDERS[arrangement.order or DEFAULT_ORDER]
    requests = []
    for request, prompt, number in zip(workload.requests, prompts, numbers_of_prompts, strict=True):
        others = rng.choice(len(documents) - 1, size=arrangement.documents - 1, replace=False)
        others += others >= number
        chosen = [separated[index] for index in order(number, others, order_rng).tolist()]
        spans = _arrangement_spans(prompt, chosen, arrangement, joints)
        requests.append(replace(request, spans=spans))
    return workload.with_requests(requests, arrangement.line())


def with_independent_documents(workload: Workload, independent: bool | None) -> Workload:
    """Return the workload with documents marked as independent or ordered; None leaves it
    unchanged.

    An independent document can be reused at any position. ValueError unless each prompt has one
    document.
    """
    if independent is None:
        return workload
    key = f"workload.documents_independent={str(independent).lower()}"
    positions = [
        (request, _document_index(request, key, workload.name)) for request in workload.requests
    ]
    marked = {
        id(request.spans[index]): replace(request.spans[index], independent=independent)
        for request, index in positions
    }
    requests = [
        replace(request, spans=tuple(marked.get(id(span), span) for span in request.spans))
        for request, _ in positions
    ]
    return workload.with_requests(
        requests, f"documents {'independent' if independent else 'ordered'}"
    )


def _document_index(request: Request, key: str, name: str) -> int:
    """Return the index of the document's span.

    ValueError, which names `key`, unless the prompt has one reusable document followed by a
    question.
    """
    positions = [index for index, span in enumerate(request.spans) if span.reusable]
    unexpected = [span for span in request.spans if span.independent and not span.reusable]
    if len(positions) != 1 or unexpected or len(request.spans) == positions[0] + 1:
        raise ValueError(
            f"{key} with {name}: expected prompts of one reusable document and a question, unlike request {request.id}"
        )
    return positions[0]


def _distinct(documents: Sequence[Span]) -> tuple[list[Span], list[int]]:
    """Return the distinct documents in order of first appearance, and the number of each input
    document."""
    spans = {id(span): span for span in documents}
    texts = {key: span.tokens.tobytes() for key, span in spans.items()}
    numbers: dict[bytes, int] = {}
    of_span = {key: numbers.setdefault(text, len(numbers)) for key, text in texts.items()}
    distinct = {of_span[key]: span for key, span in reversed(spans.items())}
    return [distinct[number] for number in range(len(numbers))], [
        of_span[id(span)] for span in documents
    ]


def _arrangement_spans(
    prompt: _Prompt, documents: list[Span], arrangement: Arrangement, joints: Joints
) -> tuple[Span, ...]:
    question = prompt.question[joints.question_overlap :]
    if arrangement.question == "after":
        return (*prompt.opening, *documents, Span(question))
    cut = len(question) - joints.answer
    question_span = Span(np.concatenate([question[:cut], joints.separator]))
    answer = question[cut + joints.answer_overlap :]
    return (*prompt.opening, question_span, *documents, *([Span(answer)] if len(answer) else []))


# ------------------------------------------------------------------------------
# Novel requests: prompts as long as existing ones, with passages that occur in no other
# request.
# ------------------------------------------------------------------------------


def with_novel(workload: Workload, count: int, draw: np.random.Generator) -> Workload:
    """Return the workload with `count` more requests, each as long as a drawn one and in a new
    group.

    Spans before the first passage, such as a system prompt, are shared. All other token ids are
    fresh, and may exceed a vocabulary.
    """
    if not count:
        return workload
    existing = workload.requests
    ids = FreshIds.above(existing)
    groups = 1 + max(request.group_id for request in existing)
    chosen = draw.integers(len(existing), size=count).tolist()
    novel = []
    for number, index in enumerate(chosen):
        # the lengths of an existing request, of which only the opening spans are shared
        request, id = existing[index], len(existing) + number
        first = next(
            (at for at, span in enumerate(request.spans) if span.independent), len(request.spans)
        )
        renewed = [replace(span, ids=ids.take(len(span.ids))) for span in request.spans[first:]]
        spans: tuple[Span, ...] = (*request.spans[:first], *renewed)
        novel.append(
            replace(request, id=id, group_id=groups + number, spans=spans, answer=None, gold=())
        )
    return workload.with_requests(
        (*existing, *novel), f"{count} novel requests, whose passages no other one has"
    )
