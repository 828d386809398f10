"""Which requests of a corpus are served: the same rules, in the same order, for every source."""

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
    """What to take of a corpus.

    `documents`               the first n groups that fit; None takes all.
    `questions_per_document`  the first n requests of each group; None takes all.
    `max_prompt_tokens`       longest prompt; None means no limit.
    `too_long`                "cut" shortens the document span from its end, by the same amount for all its selected
                              questions, and drops it if nothing would remain; "drop" drops the document.
    `output_tokens`           output length of all requests; None takes the gold answer's, or `unknown_output`.
    `documents_per_prompt`    documents that will share a prompt: each has an equal part of the room beside the longest
                              opening and question, so that it is cut alike in all its prompts.
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
    """Take the requests that `selection` asks for and make their token ids; raise ValueError if none is left."""
    kept, cut, dropped = _choose(corpus, selection)
    if not kept:
        raise ValueError(
            f"workload.max_prompt_tokens={selection.max_prompt_tokens} leaves nothing of {corpus.name}; "
            f"expected a limit that at least one document fits"
        )
    groups = len({corpus.rows[row.row].group_id for row in kept})
    check_documents(selection, groups, corpus.name)
    requests = _requests(corpus, kept, selection)
    detail = corpus.detail.replace("{documents}", str(groups)).replace("{requests}", str(len(requests)))
    return Workload(corpus.name, requests, Provenance(corpus.kind, detail, cut, dropped))


def refuse_cut(kind: str, selection: Selection, expected: str) -> None:
    """Refuse to cut prompts of many parts, of which none is the document that a limit could cut."""
    if selection.max_prompt_tokens is not None:
        raise ValueError(f"workload.max_prompt_tokens={selection.max_prompt_tokens} with {kind}; expected {expected}")


def output_only(kind: str, selection: Selection, expected: str) -> int:
    """Output tokens of requests that are made up whole: no other key of a selection means anything to them."""
    refuse_cut(kind, selection, expected)
    for key in ("documents", "questions_per_document"):
        if getattr(selection, key) is not None:
            raise ValueError(f"workload.{key}={getattr(selection, key)} with {kind}; expected null")
    return selection.output_tokens or 1


def check_documents(selection: Selection, available: int, name: str) -> None:
    """Refuse to serve fewer documents than were asked for."""
    if selection.documents is not None and selection.documents > available:
        fitting = "" if selection.max_prompt_tokens is None else " that fit workload.max_prompt_tokens"
        raise ValueError(
            f"workload.documents={selection.documents}; expected at most {available}, the documents of {name}{fitting}"
        )


class _Kept(NamedTuple):
    """A kept row: its number in the corpus, the span that is its document, and the length of that.

    The length belongs to the row, because groups with the same document may leave it different room.
    """

    row: int
    document: int
    length: int

    def spans(self, corpus: Corpus) -> list[tuple[int, int]]:
        """Its spans as (span number, length)."""
        spans = corpus.rows[self.row].spans
        lengths = corpus.lengths[list(spans)].tolist()
        return [(one, self.length if one == self.document else own) for one, own in zip(spans, lengths, strict=True)]


def _choose(corpus: Corpus, selection: Selection) -> tuple[list[_Kept], int, int]:
    """Return the kept rows in file order and the numbers of documents that were cut and dropped."""
    kept: list[_Kept] = []
    groups = cut = dropped = 0
    rooms = _Rooms(corpus, selection)
    for members in _groups(corpus.rows).values():
        if groups == selection.documents:
            break
        fitting, shortened, misfits = _fit(rooms, members[: selection.questions_per_document])
        kept += fitting
        cut += shortened
        dropped += misfits
        groups += bool(fitting)
    return sorted(kept), cut, dropped


def _groups(rows: Iterable[Row]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    return groups


def _fit(rooms: _Rooms, members: list[int]) -> tuple[list[_Kept], int, int]:
    """Apply the length limit to one group: its fitting rows, how many documents were cut, how many dropped."""
    corpus = rooms.corpus
    fitting: list[_Kept] = []
    cut = dropped = 0
    for document, rows in _by_document(corpus, members).items():
        length = int(corpus.lengths[document])
        room = rooms.of(document, rows)
        if room < length and (rooms.selection.too_long == "drop" or room < 1):
            dropped += 1
            continue
        cut += room < length
        fitting += [_Kept(row, document, min(room, length)) for row in rows]
    return fitting, cut, dropped


@dataclass(frozen=True)
class _Rooms:
    """What the length limit leaves for documents."""

    corpus: Corpus
    selection: Selection

    def of(self, document: int, rows: list[int]) -> int:
        """Tokens of the document that the longest of its prompts has room for, its own length without a limit."""
        limit, documents = self.selection.max_prompt_tokens, self.selection.documents_per_prompt
        if limit is None:
            return int(self.corpus.lengths[document])
        beside = max(map(self._beside, rows)) if documents == 1 else self._most_beside
        return (limit - beside) // documents

    def _beside(self, row: int) -> int:
        """Tokens of a prompt beside its document."""
        spans = self.corpus.rows[row].spans
        document = _document_span(self.corpus, self.corpus.rows[row])
        return int(self.corpus.lengths[list(spans)].sum() - self.corpus.lengths[document])

    @cached_property
    def _most_beside(self) -> int:
        """Tokens beside the document of the longest prompt that may be served."""
        # A dropped document makes room for a later one.
        count = None if self.selection.too_long == "drop" else self.selection.documents
        groups = list(_groups(self.corpus.rows).values())[:count]
        return max(self._beside(row) for rows in groups for row in rows[: self.selection.questions_per_document])


def _by_document(corpus: Corpus, members: list[int]) -> dict[int, list[int]]:
    documents: dict[int, list[int]] = {}
    for index in members:
        documents.setdefault(_document_span(corpus, corpus.rows[index]), []).append(index)
    return documents


def _document_span(corpus: Corpus, row: Row) -> int:
    """The span that a length limit may shorten: the first reusable one, or the last where none is reusable."""
    return next((span for span in row.spans if corpus.reusable[span]), row.spans[-1])


def _spans(corpus: Corpus, kept: Iterable[_Kept]) -> dict[tuple[int, int], Span]:
    used = sorted({span for row in kept for span in row.spans(corpus)})
    # Ascending lengths: the last one that the dictionary keeps is the longest.
    tokens = corpus.expand(dict(used))
    return {
        (span, length): Span(tokens[span][:length], bool(corpus.independent[span]), bool(corpus.reusable[span]))
        for span, length in used
    }


def _requests(corpus: Corpus, kept: Sequence[_Kept], selection: Selection) -> tuple[Request, ...]:
    spans = _spans(corpus, kept)
    numbers: dict[int, int] = {}
    return tuple(
        Request(
            id=number,
            group_id=numbers.setdefault(row.group_id, len(numbers)),
            spans=tuple([spans[span] for span in one.spans(corpus)]),
            output_len=selection.output_tokens or row.output_len or selection.unknown_output,
            arrived_at=0 if corpus.arrived_at is None else corpus.arrived_at[index],
            answer=row.answer,
            wait_ns=0 if corpus.waits_ns is None else corpus.waits_ns[index],
        )
        for number, (index, row, one) in enumerate((one.row, corpus.rows[one.row], one) for one in kept)
    )
