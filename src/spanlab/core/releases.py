"""Releases of vLLM as rules: what differs between them is this file.

A policy asks for a rule, never for a release. Each rule was found in vLLM's own code, and is compared with it step by
step (`tests/oracle`, `benchmarks/conformance`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal


def _rule(words: str, kind: str) -> object:
    """Return a field with its words, and the kind of the stored cases that show it."""
    return field(metadata={"words": words, "kind": kind})


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Rules of one release; `docs/releases.md` is made of them.

    `drafter`          how a drafter with keys and values of its own, as EAGLE's, finds right ones in a reused block,
                       whose last one depends on the token behind it. drop: the last block of a match is computed again;
                       lookahead: the key of a block also has the next token
    `accepted_at_end`  whether tokens of accepted drafts are stored at the end of their step, else with the next one
    `renews_states`    whether a state that a request resumes from counts as written by its first step, so that requests
                       that share it wait for the next step
    `serves_behind`    whether requests behind one that preempted itself are served in the same step; with priorities
    """

    drafter: Literal["drop", "lookahead"] = _rule(  # type: ignore[assignment]
        "a drafter with KV of its own reuses, of the blocks of a match: drop: all but the last; lookahead: all, for "
        "the key of a block also has the token behind it",
        "attention, drafts of EAGLE",
    )
    accepted_at_end: bool = _rule(  # type: ignore[assignment]
        "tokens of accepted drafts are stored at the end of their step, also those of a request that ends",
        "attention, drafts",
    )
    renews_states: bool = _rule(  # type: ignore[assignment]
        "a state that a request resumes from counts as written again: requests that share it wait a step",
        "hybrid, documents",
    )
    serves_behind: bool = _rule(  # type: ignore[assignment]
        "requests behind one that preempted itself are served in the same step",
        "all, priorities",
    )


#: The releases by preset, the oldest first.
RELEASES: dict[str, Release] = {
    "vllm_0_32": Release(drafter="drop", accepted_at_end=False, renews_states=True, serves_behind=False),
    "vllm_0_33": Release(drafter="lookahead", accepted_at_end=True, renews_states=False, serves_behind=True),
}
VLLM_0_32 = RELEASES["vllm_0_32"]
RULES = {rule.name: rule.metadata for rule in fields(Release)}
