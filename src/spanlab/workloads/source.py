"""Registry of workloads by kind and source, such as quality/local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from spanlab.registry import Registry
from spanlab.workloads.corpus import Corpus
from spanlab.workloads.workload import Workload

Reader = TypeVar("Reader", bound=Callable[..., Any])

#: A reader returns a Corpus, from which requests are selected, or a Workload of requests that it has selected.
WORKLOADS: Registry[Corpus | Workload] = Registry("workload", given=("selection",))


def workload(kind: str, source: str = "modelled") -> Callable[[Reader], Reader]:
    """Decorate the function that reads or makes a workload; its parameters are keys of `workload`, or options.

    `source`  shape: measured lengths; local: a file; hub: a data set; modelled: synthetic
    """
    return WORKLOADS.register(f"{kind}/{source}")


def kinds() -> list[str]:
    """Return every kind of workload."""
    return list(dict.fromkeys(name.partition("/")[0] for name in WORKLOADS))


def sources(kind: str) -> list[str]:
    """Return the sources of a kind, its default first."""
    return [name.partition("/")[2] for name in WORKLOADS if name.partition("/")[0] == kind]
