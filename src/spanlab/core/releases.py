"""Releases of vLLM as rules: what differs between them is this file.

A policy asks for a rule, never for a release. Each rule was found in vLLM's own code, and is
compared with it step by step (`tests/oracle`, `benchmarks/conformance`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from spanlab.model_spec import ModelSpec

HOPPER = 90  #: CUDA's compute capability, times ten


def _rule(words: str) -> Any:
    return field(metadata={"words": words})


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Rules of one release; `docs/releases.md` is made of their words.

    `drafter`          how a drafter with keys and values of its own, as EAGLE's, reuses a block,
                       whose last key depends on the token behind it
    `accepted_at_end`  whether tokens of accepted drafts are stored at the end of their step, else
                       with the next one
    `renews_states`    whether a state that a request resumes from counts as written by its first
                       step
    `serves_behind`    whether requests behind one that preempted itself are served in the same
                       step; with priorities
    `admits_behind`    whether requests behind one that waits for a larger chunk are admitted in the
                       same step; with several modules of multi-token prediction
    `exporting_cards`  compute capabilities, times ten, on which GatedDeltaNet stores a state inside
                       of a chunk
    """

    drafter: Literal["drop", "lookahead"] = _rule(
        "a drafter with KV of its own reuses of a match: drop: all blocks but the last; lookahead: all blocks, for the "
        "key of a block also has the token behind it"
    )
    accepted_at_end: bool = _rule(
        "tokens of accepted drafts are stored at the end of their step, also those of a request that ends"
    )
    renews_states: bool = _rule(
        "a state that a request resumes from counts as written again: requests that share it wait a step"
    )
    serves_behind: bool = _rule(
        "requests behind one that preempted itself are served in the same step"
    )
    admits_behind: bool = _rule(
        "requests are admitted behind one whose chunk would leave fewer tokens than several modules of a drafter read"
    )
    exporting_cards: frozenset[int] = frozenset()

    def exports_states(self, model: ModelSpec, card: int) -> bool:
        """Whether the last chunk of a prompt also stores the state at its last boundary, on a card
        of this kind."""
        by_card = card in self.exporting_cards and model.kind_of_recurrence.exports
        return model.is_hybrid and (model.exports_states or by_card)


#: The releases by preset, the oldest first.
RELEASES: dict[str, Release] = {
    "vllm_0_32": Release(
        drafter="drop",
        accepted_at_end=False,
        renews_states=True,
        serves_behind=False,
        admits_behind=False,
    ),
    "vllm_0_33": Release(
        drafter="lookahead",
        accepted_at_end=True,
        renews_states=False,
        serves_behind=True,
        admits_behind=True,
        exporting_cards=frozenset({HOPPER}),
    ),
}
VLLM_0_32 = RELEASES["vllm_0_32"]
#: Words of the rules that decide a case; which states a card exports is a setting of the case.
WORDS: dict[str, str] = {
    rule.name: rule.metadata["words"] for rule in fields(Release) if rule.metadata
}
