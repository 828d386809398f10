"""Workload: requests that are ready to be served, and their provenance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Request
from spanlab.core.token_string import TokenIds, Tokens
from spanlab.registry import Registry, one_of
from spanlab.workloads.logs.log import Log

#: Form of a prompt in a call: token ids or text for completions, or one user message for chat
#: completions.
PROMPTS = ("tokens", "text", "messages")


def check_prompts(path: str, prompts: str, tokenizer: str | None) -> None:
    """Reject text prompts without a tokenizer, and an unused one; both keys are under `path`."""
    chosen = f"{path}.prompts={prompts}"
    one_of(f"{path}.prompts", prompts, PROMPTS)
    if tokenizer is None and prompts != "tokens":
        raise ValueError(f"{chosen}: expected {path}.tokenizer too, a tokenizer.json or its folder")
    if tokenizer is not None and prompts == "tokens":
        unread = f"{path}.tokenizer={tokenizer} with {chosen}"
        raise ValueError(f"{unread}: expected null, or text or messages")


Label = str | int
ProvenanceKind = Literal["hub text", "local text", "local trace", "measured shape", "modelled"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Source of the requests, and the effect of the length limit on them.

    `detail`             one sentence without its full stop, with the selected numbers.
    `documents_cut`      documents shortened to fit `max_prompt_tokens`.
    `documents_dropped`  documents left out, with their questions, because they do not fit.
    """

    kind: ProvenanceKind
    detail: str
    documents_cut: int = 0
    documents_dropped: int = 0

    def line(self) -> str:
        """Return one line for figures and summaries: `measured shape: 48 QuALITY articles, …; 2
        documents cut`."""
        counts = ((self.documents_cut, "cut"), (self.documents_dropped, "dropped"))
        return "; ".join(
            [f"{self.kind}: {self.detail}"]
            + [
                f"{count} {'document' if count == 1 else 'documents'} {word}"
                for count, word in counts
                if count
            ]
        )


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Workload:
    """Requests with ids 0..n-1 in file order and groups numbered by first appearance.

    `labels`  label names that analyses group requests by, each with a value per request, in request
              order.
    `log`     the log of a workload from a log, in columns; `requests` is empty until a study serves
              it.
    `notes`   caveats about requests that a log was read into, one sentence each.
    `origin`  fingerprint of the log that decides the requests, with the settings; empty: they do
              not come from one.
    """

    name: str
    requests: tuple[Request, ...]
    provenance: Provenance
    labels: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)
    log: Log | None = None
    notes: tuple[str, ...] = ()
    origin: str = ""

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.requests) if self.log is None else self.log.requests

    def with_name(self, name: str) -> Workload:
        """Return the workload under another name, because a file may contain other data than its
        format suggests."""
        provenance = replace(self.provenance, detail=f"{name}, read as {self.provenance.detail}")
        return replace(self, name=name, provenance=provenance)

    def with_requests(self, requests: Sequence[Request], change: str) -> Workload:
        """Return the workload with changed requests, and add the change to the provenance."""
        provenance = replace(self.provenance, detail=f"{self.provenance.detail}; {change}")
        return replace(self, requests=tuple(requests), provenance=provenance, origin="")


@dataclass(frozen=True, slots=True)
class Labelled:
    """A request without its id, and its labels."""

    request: Request
    labels: Mapping[str, Label]


def labelled_workload(name: str, detail: str, labelled: Sequence[Labelled]) -> Workload:
    """Number the requests in order; all have the same label names."""
    requests = tuple(replace(item.request, id=index) for index, item in enumerate(labelled))
    labels = {key: tuple(item.labels[key] for item in labelled) for key in labelled[0].labels}
    return Workload(name, requests, Provenance("modelled", detail), labels)


# ------------------------------------------------------------------------------
# Joints: tokens between the parts of a prompt with several documents, or with the question
# before the documents.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Joints:
    """Separator after each document, and the token counts at which a question is cut.

    `separator`          int32 token ids after each document.
    `question_overlap`   leading tokens of a question that the separator already contains.
    `answer_overlap`     leading tokens of the answer's opening that the separator already contains.
    `answer`             last tokens of a question: the answer's opening, which stays at the end of
                         the prompt.
    """

    separator: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    question_overlap: int = 0
    answer_overlap: int = 0
    answer: int = 0

    def counts(self) -> dict[str, int]:
        """Return the token counts that a shape stores."""
        overlaps = {
            "question_overlap": self.question_overlap,
            "answer_overlap": self.answer_overlap,
        }
        return {"separator": len(self.separator), "answer": self.answer} | overlaps


#: A function, because few workloads need the joints and computing them may parse a tokenizer.
FindJoints = Callable[[], Joints]


# ------------------------------------------------------------------------------
# Corpus: all distinct spans of a source, and its requests as rows of span numbers, before
# selection.
# ------------------------------------------------------------------------------

Expand = Callable[[Mapping[int, int]], Mapping[int, TokenIds]]


RunsOf = Callable[[Sequence[int]], Iterator[list[tuple[int, int]]]]


class Row(NamedTuple):
    """One request as span numbers; `output_len` 0 means unknown."""

    group_id: int
    spans: tuple[int, ...]
    output_len: int = 0
    answer: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Spans and rows of one source, with token ids made only on demand.

    `detail`       provenance sentence with placeholders `{documents}` and `{requests}` for the
                   selected counts.
    `lengths`      int64, shape (spans,); `independent` and `reusable` bool, shape (spans,).
    `expand`       maps {span: number of tokens} to {span: its first tokens, as many as requested}.
    `arrived_at`   arrival of each row in integer nanoseconds; None if the source has no times.
    `waits_ns`     integer nanoseconds between each row and the end of the previous row of its
                   group; None if the source has none.
    `after`        rows that each row waits for; None if rows of a group are a line
    `groups`       group of each row; None: as the rows say
    `runs_of`      returns first id and length of the runs of ids that given rows are, in order;
                   None if the source does not know its text by runs alone, or if spans are
                   independent or reusable
    `joints`       returns the joints of the prompt layout; None if the source has no prompt layout.
    """

    name: str
    kind: ProvenanceKind
    detail: str
    lengths: NDArray[np.int64]
    independent: NDArray[np.bool_]
    reusable: NDArray[np.bool_]
    rows: Sequence[Row]
    expand: Expand
    arrived_at: Sequence[int] | None = None
    waits_ns: Sequence[int] | None = None
    joints: FindJoints | None = None
    after: Sequence[tuple[int, ...]] | None = None
    groups: Sequence[int] | None = None
    runs_of: RunsOf | None = None


def expand_views(spans: Sequence[Tokens]) -> Expand:
    """Return the `expand` function of a corpus in memory; it returns views, without copies."""
    return lambda lengths: {span: spans[span][:length] for span, length in lengths.items()}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Spans (int32 token ids), their flags (bool, shape (spans,)) and the rows made of them."""

    spans: tuple[Tokens, ...]
    independent: NDArray[np.bool_]
    reusable: NDArray[np.bool_]
    rows: tuple[Row, ...]

    def corpus(self, name: str, kind: ProvenanceKind, detail: str) -> Corpus:
        """Return a corpus of these spans and rows."""
        lengths = np.array([len(span) for span in self.spans], dtype=np.int64)
        return Corpus(
            name,
            kind,
            detail,
            lengths,
            self.independent,
            self.reusable,
            self.rows,
            expand_views(self.spans),
        )


# ------------------------------------------------------------------------------
# Token ids that occur nowhere else in a workload.
# ------------------------------------------------------------------------------


class FreshIds:
    """Counter of unused token ids from `first` up."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    @staticmethod
    def above(requests: Iterable[Request]) -> FreshIds:
        """Return a counter that starts above the largest token id of the requests."""
        spans = {id(span): span for request in requests for span in request.spans}
        return FreshIds(
            1 + max((int(span.tokens.max(initial=-1)) for span in spans.values()), default=-1)
        )

    def take(self, count: int) -> Tokens:
        """Return the next ids, int32, shape (count,); ValueError if they exceed int32."""
        first, self._next = self._next, self._next + count
        if self._next > np.iinfo(np.int32).max:
            raise ValueError(f"workload: {self._next:,} token ids; expected fewer than 2^31 tokens")
        return np.arange(first, self._next, dtype=np.int32)


# ------------------------------------------------------------------------------
# Registry of sources of workloads by kind and source, such as quality/local.
# ------------------------------------------------------------------------------

Reader = TypeVar("Reader", bound=Callable[..., Any])

#: Readers by kind and source. A reader returns a Corpus, from which requests are selected, or a
#: Workload of requests that it has selected.
SOURCES: Registry[Corpus | Workload] = Registry("workload", given=("selection",))


def workload(kind: str, source: str = "modelled") -> Callable[[Reader], Reader]:
    """Decorate the function that reads or makes a workload; its parameters are keys of `workload`.

    `source`  shape: measured lengths; local: a file; hub: a data set; modelled: synthetic
    """
    return SOURCES.register(f"{kind}/{source}")


def sources(kind: str) -> list[str]:
    """Return the sources of a kind, its default first."""
    return [name.partition("/")[2] for name in SOURCES if name.partition("/")[0] == kind]


def shared_length(tokens: Tokens, other: Tokens) -> int:
    """Length of the longest common prefix, in tokens."""
    length = min(len(tokens), len(other))
    differs = tokens[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
