"""Selection of the served requests of a corpus: the same rules, in the same order, for every source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from spanlab.checks import one_of, positive
from spanlab.core.request import Request, Span
from spanlab.workloads.corpus import Corpus, Row
from spanlab.workloads.workload import Provenance, Workload

DEFAULT_OUTPUT_TOKENS = 64
TOO_LONG = ("cut", "drop")


@dataclass(frozen=True, slots=True)
class Selection:
    """Limits that select requests of a corpus.

    `documents`               the first n groups that fit; None takes all.
    `questions_per_document`  the first n requests of each group; None takes all.
    `max_prompt_tokens`       longest prompt; None means no limit.
    `too_long`                "cut" shortens the document span from its end, by the same amount for all its selected
                              questions, and drops it if nothing would remain; "drop" drops the document.
    `output_tokens`           output length of all requests; None takes the gold answer's, or `unknown_output`.
    `documents_per_prompt`    documents per prompt: each gets an equal share of the limit minus the longest opening and
                              question, so that it is cut to the same length in all its prompts.
    """

    documents: int | None = None
    questions_per_document: int | None = None
    max_prompt_tokens: int | None = None
    too_long: str = "cut"
    output_tokens: int | None = None
    unknown_output: int = DEFAULT_OUTPUT_TOKENS
    documents_per_prompt: int = 1

    def __post_init__(self) -> None:
        for key in ("documents", "questions_per_document", "max_prompt_tokens", "output_tokens"):
            positive(f"workload.{key}", getattr(self, key))
        one_of("workload.too_long", self.too_long, TOO_LONG)


def select(corpus: Corpus, selection: Selection) -> Workload:
    """Select requests and make their token ids; raise ValueError if no request remains."""
    selected, cut, dropped = _choose(corpus, selection)
    if not selected:
        raise ValueError(
            f"workload.max_prompt_tokens={selection.max_prompt_tokens} leaves nothing of {corpus.name}; "
            f"expected a limit that fits at least one document"
        )
    group_count = len({corpus.rows[row.row].group_id for row in selected})
    check_documents(selection, group_count, corpus.name)
    requests = _requests(corpus, selected, selection)
    detail = corpus.detail.replace("{documents}", str(group_count)).replace("{requests}", str(len(requests)))
    return Workload(corpus.name, requests, Provenance(corpus.kind, detail, cut, dropped))


def refuse_length_limit(kind: str, selection: Selection, expected: str) -> None:
    """Reject a length limit for prompts without a single document to cut."""
    if selection.max_prompt_tokens is not None:
        raise ValueError(f"workload.max_prompt_tokens={selection.max_prompt_tokens} with {kind}; expected {expected}")


def selected_output_tokens(kind: str, selection: Selection, expected: str) -> int:
    """Return the output tokens for synthetic prompts; reject all other selection keys, which do not apply."""
    refuse_length_limit(kind, selection, expected)
    for key in ("documents", "questions_per_document"):
        if getattr(selection, key) is not None:
            raise ValueError(f"workload.{key}={getattr(selection, key)} with {kind}; expected null")
    return selection.output_tokens or 1


def check_documents(selection: Selection, available: int, name: str) -> None:
    """Reject a selection of more documents than are available."""
    if selection.documents is not None and selection.documents > available:
        fitting = "" if selection.max_prompt_tokens is None else " that fit workload.max_prompt_tokens"
        raise ValueError(
            f"workload.documents={selection.documents}; expected at most {available}, the documents of {name}{fitting}"
        )


class _SelectedRow(NamedTuple):
    """A selected row: its number in the corpus, the span of its document, and the document's length.

    The length is per row, because the limit may cut a document to different lengths in different groups.
    """

    row: int
    document: int
    length: int

    def spans(self, corpus: Corpus) -> list[tuple[int, int]]:
        """Return its spans as (span number, length)."""
        spans = corpus.rows[self.row].spans
        lengths = corpus.lengths[list(spans)].tolist()
        return [
            (span, self.length if span == self.document else size) for span, size in zip(spans, lengths, strict=True)
        ]


def _choose(corpus: Corpus, selection: Selection) -> tuple[list[_SelectedRow], int, int]:
    """Return the selected rows in file order and the numbers of cut and dropped documents."""
    selected: list[_SelectedRow] = []
    groups = cut = dropped = 0
    limits = _DocumentLimits(corpus, selection)
    for members in _groups(corpus.rows).values():
        if groups == selection.documents:
            break
        fitting, shortened, too_long = _fit(limits, members[: selection.questions_per_document])
        selected += fitting
        cut += shortened
        dropped += too_long
        groups += bool(fitting)
    return sorted(selected), cut, dropped


def _groups(rows: Iterable[Row]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    return groups


def _fit(limits: _DocumentLimits, members: list[int]) -> tuple[list[_SelectedRow], int, int]:
    """Apply the length limit to one group; return its fitting rows and the numbers of cut and dropped documents."""
    corpus = limits.corpus
    fitting: list[_SelectedRow] = []
    cut = dropped = 0
    for document, rows in _by_document(corpus, members).items():
        length = int(corpus.lengths[document])
        limit = limits.of(document, rows)
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

    def of(self, document: int, rows: list[int]) -> int:
        """Return the tokens of a document that fit in the longest of its prompts; its length if there is no limit."""
        limit, documents = self.selection.max_prompt_tokens, self.selection.documents_per_prompt
        if limit is None:
            return int(self.corpus.lengths[document])
        other_tokens = max(map(self._other_tokens, rows)) if documents == 1 else self._most_other_tokens
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
        groups = list(_groups(self.corpus.rows).values())[:count]
        return max(self._other_tokens(row) for rows in groups for row in rows[: self.selection.questions_per_document])


def _by_document(corpus: Corpus, members: list[int]) -> dict[int, list[int]]:
    documents: dict[int, list[int]] = {}
    for index in members:
        documents.setdefault(_document_span(corpus, corpus.rows[index]), []).append(index)
    return documents


def _document_span(corpus: Corpus, row: Row) -> int:
    """Return the span that a length limit may shorten: the first reusable one, or the last if none is reusable."""
    return next((span for span in row.spans if corpus.reusable[span]), row.spans[-1])


def _spans(corpus: Corpus, rows: Iterable[_SelectedRow]) -> dict[tuple[int, int], Span]:
    used = sorted({span for row in rows for span in row.spans(corpus)})
    # Lengths ascend, so the dictionary keeps the longest one of each span.
    tokens = corpus.expand(dict(used))
    return {
        (span, length): Span(tokens[span][:length], bool(corpus.independent[span]), bool(corpus.reusable[span]))
        for span, length in used
    }


def _requests(corpus: Corpus, selected_rows: Sequence[_SelectedRow], selection: Selection) -> tuple[Request, ...]:
    spans = _spans(corpus, selected_rows)
    numbers: dict[int, int] = {}
    return tuple(
        Request(
            id=number,
            group_id=numbers.setdefault(row.group_id, len(numbers)),
            spans=tuple([spans[span] for span in selected.spans(corpus)]),
            output_len=selection.output_tokens or row.output_len or selection.unknown_output,
            arrived_at=0 if corpus.arrived_at is None else corpus.arrived_at[index],
            answer=row.answer,
            wait_ns=0 if corpus.waits_ns is None else corpus.waits_ns[index],
        )
        for number, (index, row, selected) in enumerate(
            (selected.row, corpus.rows[selected.row], selected) for selected in selected_rows
        )
    )
