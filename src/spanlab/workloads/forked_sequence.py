"""One long sequence, then prompts that share prefixes of known depths with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spanlab.checks import positive
from spanlab.core.request import Request, Span
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.selection import Selection, selected_output_tokens
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Labelled, Workload, labelled_workload


@dataclass
class ForkedSequence:
    """A cold request, then requests of the same length that fork from it.

    `prompt_tokens`  tokens of every prompt
    `depths`         shared prefixes with the cold request, as fractions of the prompt
    `visits`         requests at each depth: a policy may place a state at the first and use it at the second
    `families`       number of fresh sequences; a policy that learns has seen the depths from the second one on
    """

    prompt_tokens: int = 4096
    depths: list[float] = field(default_factory=lambda: [0.5, 0.95])
    visits: int = 2
    families: int = 3

    def __post_init__(self) -> None:
        for key in ("prompt_tokens", "visits", "families"):
            positive(f"workload.forked_sequence.{key}", getattr(self, key))
        shared = self.shared()
        if not shared or shared[0] < 1 or shared[-1] >= self.prompt_tokens or len(set(shared)) < len(shared):
            raise ValueError(
                f"workload.forked_sequence.depths={self.depths} with prompt_tokens={self.prompt_tokens}: "
                "expected different shares above 0 and below 1, a token apart"
            )

    def shared(self) -> list[int]:
        """Return the lengths of the shared prefixes in tokens, increasing."""
        return sorted(round(depth * self.prompt_tokens) for depth in self.depths)


@workload("forked_sequence")
def modelled(forked_sequence: ForkedSequence, selection: Selection) -> Workload:
    """Return the requests with the selected output length."""
    length = "workload.forked_sequence.prompt_tokens to set the length"
    return requests_of(forked_sequence, selected_output_tokens("forked_sequence", selection, length))


def requests_of(options: ForkedSequence, output_tokens: int) -> Workload:
    """Return the requests of each family: the cold one, then every visit at every depth, shallow to deep.

    The depths are marked as boundaries. Labels: `kind` (cold or fork), `depth` and `visit` of a fork.
    """
    ids = FreshIds()
    requests = [
        request for family in range(options.families) for request in _family(options, family, ids, output_tokens)
    ]
    shares = ", ".join(f"{100 * depth:g} %" for depth in sorted(options.depths))
    detail = (
        f"sequences of {options.prompt_tokens:,} tokens, then prompts that share {shares} of them, "
        f"{options.visits} visits each; {options.families} families"
    )
    return labelled_workload("forked sequence", detail, requests)


def _family(options: ForkedSequence, family: int, ids: FreshIds, output_tokens: int) -> Iterator[Labelled]:
    """Yield prompts of the trunk's spans up to their depth, then fresh tokens; the cold prompt has the whole trunk."""
    shared = options.shared()
    trunk = _trunk(shared, ids)
    cold = {"kind": "cold", "depth": "", "visit": ""}
    prompts = [(len(shared), cold)]
    for visit in range(options.visits):
        for index, depth in enumerate(sorted(options.depths)):
            labels = {"kind": "fork", "depth": f"{100 * depth:g} % shared", "visit": f"visit {visit + 1}"}
            prompts.append((index + 1, labels))
    for spans, labels in prompts:
        tail = Span(ids.take(options.prompt_tokens - shared[spans - 1]))
        request = Request(0, family, (*trunk[:spans], tail), output_len=output_tokens)
        yield Labelled(request, labels)


def _trunk(shared: Sequence[int], ids: FreshIds) -> list[Span]:
    """Return the spans of the common prefix; each ends at a depth."""
    starts = [0, *shared[:-1]]
    return [Span(ids.take(stop - start), reusable=True) for start, stop in zip(starts, shared, strict=True)]
