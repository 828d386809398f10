"""What a policy decides about one prompt: which tokens are reused, which computed, and why not more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from spanlab.core.request import Request
from spanlab.core.tree import Node, State


class Piece(NamedTuple):
    """Prompt tokens `[start, stop)`: read from the store or computed."""

    kind: Literal["reuse", "compute"]
    start: int
    stop: int


class Losses(NamedTuple):
    """Prompt tokens not reused, by cause; `records.LOSS_CAUSES` says what each means."""

    never_seen: int
    never_stored: int
    kv_evicted: int
    state_evicted: int
    state_never_placed: int
    alignment: int
    last_token: int
    locked: int


@dataclass(frozen=True, slots=True, eq=False)
class ReusePlan:
    """The answer to `Policy.plan`: lengths in prompt tokens, and the nodes they were read from.

    seen <= prompt     longest prefix that any earlier prompt began with
    matched <= seen    longest prefix whose KV is present
    resumable          longest prefix from which the store's contents allow to restart
    resume             where computation starts; reused tokens are `[0, resume)`
    """

    request: Request
    tokens: bytes
    prompt: int
    seen: int
    matched: int
    resumable: int
    resume: int
    losses: Losses
    match_node: Node
    resume_node: Node  # the deepest one that ends within the reused tokens
    resume_state: State | None

    def without_reuse(self) -> ReusePlan:
        """The same prompt computed whole, for where holding on to what it reuses would leave it no room."""
        root = self.resume_node
        while root.parent is not None:
            root = root.parent
        losses = self.losses._replace(locked=self.losses.locked + self.resume)
        return replace(self, resume=0, losses=losses, match_node=root, resume_node=root, resume_state=None)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The prompt, cut where reuse ends; empty pieces are left out."""
        cut = (Piece("reuse", 0, self.resume), Piece("compute", self.resume, self.prompt))
        return tuple(piece for piece in cut if piece.start < piece.stop)


@dataclass(slots=True, eq=False)
class Lease:
    """What an admitted request holds: locks, reserved bytes, and the checkpoints that its prefill will leave."""

    plan: ReusePlan
    node: Node  # locked, with its ancestors; the next insertion starts there
    captures: list[int]  # positions, increasing; those not yet stored
    kv_bytes: int  # reserved
    state_bytes: int  # reserved
    stored: int  # prompt tokens on the locked path; 0 while a whole private entry is not stored yet
    state: State | None  # locked until it has been read
    captured: int = 0  # states stored so far
