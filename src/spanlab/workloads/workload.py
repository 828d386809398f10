"""What a workload is once it is ready to be served: requests, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from spanlab.core.request import Request
from spanlab.workloads.logs.log import Log

Label = str | int
ProvenanceKind = Literal["hub text", "local text", "local trace", "measured shape", "modelled"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the requests come from, and what the length limit did to them.

    `detail`             one human sentence without its full stop, with the numbers that were selected.
    `documents_cut`      documents shortened to fit `max_prompt_tokens`.
    `documents_dropped`  documents left out, with their questions, because they do not fit.
    """

    kind: ProvenanceKind
    detail: str
    documents_cut: int = 0
    documents_dropped: int = 0

    def line(self) -> str:
        """One line for summaries and figures, such as `measured shape: 48 QuALITY articles, …; 2 documents cut`."""
        counts = ((self.documents_cut, "cut"), (self.documents_dropped, "dropped"))
        return "; ".join(
            [f"{self.kind}: {self.detail}"]
            + [f"{count} {'document' if count == 1 else 'documents'} {word}" for count, word in counts if count]
        )


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Workload:
    """Requests with ids 0..n-1 in file order and groups numbered by first appearance.

    `labels`  what analyses group requests by: a value per request, in their order, under each name.
    `log`     the log that the workload is, in columns; `requests` are made of it only where they are served.
    """

    name: str
    requests: tuple[Request, ...]
    provenance: Provenance
    labels: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)
    log: Log | None = None

    @property
    def size(self) -> int:
        """How many requests there are."""
        return len(self.requests) if self.log is None else self.log.requests

    def called(self, name: str) -> Workload:
        """The same requests under another name: a file may hold other data than its format is named after."""
        provenance = replace(self.provenance, detail=f"{name}, read as {self.provenance.detail}")
        return replace(self, name=name, provenance=provenance)

    def changed(self, requests: Sequence[Request], how: str) -> Workload:
        """Other prompts of the same requests, and in the provenance how they differ."""
        provenance = replace(self.provenance, detail=f"{self.provenance.detail}; {how}")
        return replace(self, requests=tuple(requests), provenance=provenance)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A request without its number, and its labels."""

    request: Request
    labels: Mapping[str, Label]


def labelled_workload(name: str, detail: str, found: Sequence[Labelled]) -> Workload:
    """The requests numbered in their order; all have the same names of labels."""
    requests = tuple(replace(one.request, id=at) for at, one in enumerate(found))
    labels = {key: tuple(one.labels[key] for one in found) for key in found[0].labels}
    return Workload(name, requests, Provenance("modelled", detail), labels)
