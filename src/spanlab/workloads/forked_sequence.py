"""One long sequence, then prompts that share its beginning up to known depths and differ after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from spanlab.checks import positive
from spanlab.core.request import Request, Span
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.selection import Selection, output_only
from spanlab.workloads.source import workload
from spanlab.workloads.workload import Labelled, Workload, labelled_workload


@dataclass
class ForkedSequence:
    """A cold request, then requests of the same length that fork from it.

    `prompt_tokens`  tokens of every prompt
    `depths`         shares of the prompt that later requests have in common with the cold one
    `visits`         requests at each depth: a policy may place a state at the first and use it at the second
    `families`       times that a fresh sequence is drawn; a policy that learns knows the depths from the second on
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
        """Tokens that later prompts have in common with the cold one, increasing."""
        return sorted(round(depth * self.prompt_tokens) for depth in self.depths)


@workload("forked_sequence")
def modelled(forked_sequence: ForkedSequence, selection: Selection) -> Workload:
    """Its requests, with as many output tokens as are selected."""
    length = "workload.forked_sequence.prompt_tokens to set the length"
    return requests_of(forked_sequence, output_only("forked_sequence", selection, length))


def requests_of(options: ForkedSequence, output_tokens: int) -> Workload:
    """Requests by family: the cold one, then every visit at every depth, shallow to deep.

    The depths are marked as boundaries. Labels: `kind` (cold or fork), `depth` and `visit` of a fork.
    """
    ids = FreshIds()
    found = [one for family in range(options.families) for one in _family(options, family, ids, output_tokens)]
    shares = ", ".join(f"{100 * depth:g} %" for depth in sorted(options.depths))
    detail = (
        f"sequences of {options.prompt_tokens:,} tokens, then prompts that share {shares} of them, "
        f"{options.visits} visits each; {options.families} families"
    )
    return labelled_workload("forked sequence", detail, found)


def _family(options: ForkedSequence, family: int, ids: FreshIds, output_tokens: int) -> Iterator[Labelled]:
    """All prompts have the trunk's spans up to their depth, then tokens of their own; the cold one has all of them."""
    shared = options.shared()
    trunk = _trunk(shared, ids)
    cold = {"kind": "cold", "depth": "", "visit": ""}
    prompts = [(len(shared), cold)]
    for visit in range(options.visits):
        for at, depth in enumerate(sorted(options.depths)):
            labels = {"kind": "fork", "depth": f"{100 * depth:g} % shared", "visit": f"visit {visit + 1}"}
            prompts.append((at + 1, labels))
    for spans, labels in prompts:
        own = Span(ids.take(options.prompt_tokens - shared[spans - 1]))
        request = Request(0, family, (*trunk[:spans], own), output_len=output_tokens)
        yield Labelled(request, labels)


def _trunk(shared: Sequence[int], ids: FreshIds) -> list[Span]:
    """Spans of the common beginning; each ends at a depth."""
    starts = [0, *shared[:-1]]
    return [Span(ids.take(stop - start), reusable=True) for start, stop in zip(starts, shared, strict=True)]
