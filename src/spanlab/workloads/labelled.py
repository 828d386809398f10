"""Made-up workloads whose requests have labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spanlab.core.request import Request
from spanlab.workloads.workload import Label, Provenance, Workload


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
