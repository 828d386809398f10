"""Attention over keys that lie in a row at their final positions: the libraries that may serve it.

A library is a registered class. The first that is installed and takes the query serves; torch's own is always there.
None but torch's on a CPU was ever run here: the others are called as their documentation says.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows and keys of sequences one behind the other, of which the last rows see all keys of their own.

    Row i of n sees the first keys - n + 1 + i of the keys. `rows` and `keys` are where each sequence begins and the
    last ends, on the host; the tensors are the same, int32, on the device.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    row_starts: Tensor
    key_starts: Tensor

    @property
    def most(self) -> tuple[int, int]:
        """Rows and keys of a sequence, at most."""
        longest_rows, longest_keys = (
            max(stop - start for start, stop in pairwise(starts)) for starts in (self.rows, self.keys)
        )
        return longest_rows, longest_keys


class Library(ABC):
    """One library's causal attention of several sequences."""

    module: ClassVar[str]

    def serves(self, query: Tensor) -> bool:
        """Whether the library is installed and takes such queries."""
        return query.is_cuda and query.dtype in HALF and importlib.util.find_spec(self.module) is not None

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out [T, Hq, D] and natural log-sum-exps, float32 [T, Hq], of keys and values [K, Hkv, D]."""


LIBRARIES: dict[str, Library] = {}
"""By name, the best first."""


def _library(name: str) -> Callable[[type[Library]], type[Library]]:
    def registered(kind: type[Library]) -> type[Library]:
        LIBRARIES[name] = kind()
        return kind

    return registered


def best(query: Tensor) -> Library | None:
    """The first library that serves such queries."""
    return next((library for library in LIBRARIES.values() if library.serves(query)), None)


@_library("flash_attn")
class FlashAttention(Library):
    """`flash_attn_varlen_func` of flash-attn 2.6 or later, causal as of the last row."""

    module = "flash_attn"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_varlen_func

        out, lse, _ = flash_attn_varlen_func(
            query, key, value, sequences.row_starts, sequences.key_starts, *sequences.most,
            softmax_scale=scale, causal=True, return_attn_probs=True,
        )  # fmt: skip
        return out, lse.T


@_library("flashinfer")
class FlashInfer(Library):
    """`BatchPrefillWithRaggedKVCacheWrapper` of FlashInfer, whose log-sum-exps are to base 2."""

    module = "flashinfer"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        planned = _planned(sequences, query.shape[1], key.shape[1], query.shape[2], query.dtype, scale)
        out, lse = planned.run(query, key, value, return_lse=True)
        return out, lse * math.log(2)


@lru_cache(maxsize=4)
def _planned(
    sequences: Sequences, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, scale: float
) -> Any:  # of a library that carries no types
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=sequences.row_starts.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        sequences.row_starts, sequences.key_starts, heads, kv_heads, head_dim,
        causal=True, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return wrapper


@_library("sdpa")
class Sdpa(Library):
    """Torch's flash attention: keys before the rows, then the square of the rows, merged by log-sum-exp."""

    def serves(self, query: Tensor) -> bool:
        return not query.is_cuda or query.dtype in HALF

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for rows, keys in zip(pairwise(sequences.rows), pairwise(sequences.keys), strict=True):
            here, middle = slice(*rows), keys[1] - (rows[1] - rows[0])
            parts = [_flash(query[here], key[middle : keys[1]], value[middle : keys[1]], scale, causal=True)]
            if middle > keys[0]:
                parts.append(_flash(query[here], key[keys[0] : middle], value[keys[0] : middle], scale, causal=False))
            out[here], lse[here] = _merged(parts)
        return out, lse


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Out [rows, Hq, D] and log-sum-exps [rows, Hq]; kv heads are the batch, their keys repeated with a stride of 0."""
    heads = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)
    key, value = (x.transpose(0, 1)[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value))
    if query.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention(heads, key, value, 0.0, causal, False, scale=scale)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = flash(heads, key, value, is_causal=causal, scale=scale)
    out, lse = found[:2]
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    each = torch.stack([lse for _, lse in parts])
    lse = each.logsumexp(0)
    weights = (each - lse).exp()[..., None]
    out = sum(weight * out.float() for weight, (out, _) in zip(weights, parts, strict=True))
    return out.to(parts[0][0].dtype), lse
