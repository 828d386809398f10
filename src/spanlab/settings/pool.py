"""Settings of a pool of hashed blocks for KV and states."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import not_negative, one_of, positive
from spanlab.core.tiers.rules import LOAD_WHEN


@dataclass
class PoolSettings:
    """One pool of hashed blocks for KV and, in hybrid models, for states; see `BlockRules`.

    `block_size`  tokens per block; null: 16, or in hybrid models the least multiple of 16 whose KV is no smaller than
                  a layer's state
    `retention`   states to store; null: every state that is written; 0: the state at the prompt's last block boundary,
                  and one where a shared prefix has none yet; n: also one per n tokens
    `junctions`   whether a state is stored at the end of a shared prefix that has none
    `cut`         whether prefill chunks end at each multiple of `retention`, so that a state exists there
    `load_when`   when blocks of `store.tiers` are loaded: break_even, where loading is faster than recomputing; always;
                  never, and no block is written to the tiers; null: break_even; with `store.tiers` only
    """

    block_size: int | None = None
    retention: int | None = 0
    junctions: bool = True
    cut: bool = False
    load_when: str | None = None

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings, naming the arm."""
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
        """Options of the policy `blocks`."""
        return {key: getattr(self, key) for key in ("block_size", "retention", "junctions", "cut")}
