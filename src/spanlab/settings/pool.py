"""The pool of hashed blocks that a strategy keeps KV and states in."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import not_negative, one_of, positive
from spanlab.core.tiers.rules import LOAD_WHEN


@dataclass
class PoolSettings:
    """One pool of hashed blocks for KV and, in hybrid models, for states; see `BlockRules`.

    `block_size`  tokens per block; null: 16, or in hybrid models the least multiple of 16 whose KV is no smaller than
                  a layer's state
    `retention`   null: every state that was written; 0: the state at the prompt's last block boundary, and one where a
                  shared prefix has none yet; n: also one per n tokens
    `junctions`   whether a shared prefix without a state gets one
    `cut`         whether chunks of a prompt end at each multiple of `retention`, so that there is a state to keep
    `load_when`   what `store.tiers` have is loaded: break_even, where that is faster than computing it; always; or
                  never, and nothing is written to them either; null: break_even; with `store.tiers` alone
    """

    block_size: int | None = None
    retention: int | None = 0
    junctions: bool = True
    cut: bool = False
    load_when: str | None = None

    def check(self, arm: str) -> None:
        """Refuse what makes no sense, naming the arm."""
        positive(f"{arm}.pool.block_size", self.block_size)
        not_negative(f"{arm}.pool.retention", self.retention)
        if self.load_when is not None:
            one_of(f"{arm}.pool.load_when", self.load_when, LOAD_WHEN)
        if self.block_size and self.retention and self.retention % self.block_size:
            expected = f"expected 0 or a multiple of block_size={self.block_size}"
            raise ValueError(f"{arm}.pool.retention={self.retention}: {expected}")
        if self.cut and not self.retention:
            raise ValueError(f"{arm}.pool.cut=True with retention={self.retention}: expected a retention in tokens")

    @property
    def options(self) -> dict[str, int | bool | None]:
        """What the policy takes."""
        return {key: getattr(self, key) for key in ("block_size", "retention", "junctions", "cut")}
