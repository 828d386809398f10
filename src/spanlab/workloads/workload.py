"""Workload: requests that are ready to be served, and their provenance."""

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
        """Return one line for figures and summaries: `measured shape: 48 QuALITY articles, …; 2 documents cut`."""
        counts = ((self.documents_cut, "cut"), (self.documents_dropped, "dropped"))
        return "; ".join(
            [f"{self.kind}: {self.detail}"]
            + [f"{count} {'document' if count == 1 else 'documents'} {word}" for count, word in counts if count]
        )


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Workload:
    """Requests with ids 0..n-1 in file order and groups numbered by first appearance.

    `labels`  label names that analyses group requests by, each with a value per request, in request order.
    `log`     the log of a workload from a log, in columns; `requests` is empty until a study serves it.
    `notes`   caveats about requests that a log was read into, one sentence each.
    """

    name: str
    requests: tuple[Request, ...]
    provenance: Provenance
    labels: Mapping[str, tuple[Label, ...]] = field(default_factory=dict)
    log: Log | None = None
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.requests) if self.log is None else self.log.requests

    def with_name(self, name: str) -> Workload:
        """Return the workload under another name, because a file may contain other data than its format suggests."""
        provenance = replace(self.provenance, detail=f"{name}, read as {self.provenance.detail}")
        return replace(self, name=name, provenance=provenance)

    def with_requests(self, requests: Sequence[Request], change: str) -> Workload:
        """Return the workload with changed requests, and add the change to the provenance."""
        provenance = replace(self.provenance, detail=f"{self.provenance.detail}; {change}")
        return replace(self, requests=tuple(requests), provenance=provenance)


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
