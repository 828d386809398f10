"""Attention over contiguous keys at their final positions, by the libraries that implement it.

The first library that is installed and accepts the query is used; torch is always installed. Only torch's on a CPU has
been run here: the others are called as documented.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from spanlab_kernels.attention import torch_cpu

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Rows and keys of concatenated sequences; the rows of a sequence are its last tokens.

    Row i of n sees the first keys - n + 1 + i of the keys. `rows` and `keys` have the start of each sequence and the
    end of the last one, on the host; the tensors have the same numbers, int32, on the device.
    """

    rows: tuple[int, ...]
    keys: tuple[int, ...]
    row_starts: Tensor
    key_starts: Tensor

    @property
    def max_lengths(self) -> tuple[int, int]:
        """The largest number of rows and of keys of a sequence."""
        longest_rows, longest_keys = (
            max(stop - start for start, stop in pairwise(starts)) for starts in (self.rows, self.keys)
        )
        return longest_rows, longest_keys


class Library(ABC):
    """Causal attention of several sequences by one library."""

    module: ClassVar[str]

    def serves(self, query: Tensor) -> bool:
        """Whether the library is installed and accepts such queries."""
        return query.is_cuda and query.dtype in HALF and importlib.util.find_spec(self.module) is not None

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Out [T, Hq, D] and natural log-sum-exps, float32 [T, Hq], of keys and values [K, Hkv, D]."""


class FlashAttention(Library):
    """`flash_attn_varlen_func` of flash-attn 2.6 or later, with the causal mask aligned to the last row."""

    module = "flash_attn"

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        from flash_attn import flash_attn_varlen_func

        out, lse, _ = flash_attn_varlen_func(
            query, key, value, sequences.row_starts, sequences.key_starts, *sequences.max_lengths,
            softmax_scale=scale, causal=True, return_attn_probs=True,
        )  # fmt: skip
        return out, lse.T


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
) -> Any:  # of a library without type annotations
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=sequences.row_starts.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        sequences.row_starts, sequences.key_starts, heads, kv_heads, head_dim,
        causal=True, sm_scale=scale, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    return wrapper


class Sdpa(Library):
    """Torch's flash attention over the keys before the rows and over the rows' own keys, merged by log-sum-exp."""

    def serves(self, query: Tensor) -> bool:
        return not query.is_cuda or query.dtype in HALF

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
        for rows, keys in zip(pairwise(sequences.rows), pairwise(sequences.keys), strict=True):
            own_rows, middle = slice(*rows), keys[1] - (rows[1] - rows[0])
            parts = [_flash(query[own_rows], key[middle : keys[1]], value[middle : keys[1]], scale, causal=True)]
            if middle > keys[0]:
                parts.append(
                    _flash(query[own_rows], key[keys[0] : middle], value[keys[0] : middle], scale, causal=False)
                )
            out[own_rows], lse[own_rows] = _merged(parts)
        return out, lse


LIBRARIES: dict[str, Library] = {"flash_attn": FlashAttention(), "flashinfer": FlashInfer(), "sdpa": Sdpa()}
"""Libraries by name, the preferred one first."""


def select_library(query: Tensor) -> Library | None:
    """The first library that accepts such queries, or None."""
    return next((library for library in LIBRARIES.values() if library.serves(query)), None)


def _flash(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Out [rows, Hq, D] and log-sum-exps [rows, Hq]; kv heads are the batch, their keys repeated with a stride of 0."""
    heads = query.unflatten(1, (key.shape[1], -1)).permute(1, 2, 0, 3)
    key, value = (x.transpose(0, 1)[:, None].expand(-1, heads.shape[1], -1, -1) for x in (key, value))
    if query.is_cuda:
        results = torch.ops.aten._scaled_dot_product_flash_attention(heads, key, value, 0.0, causal, False, scale=scale)
    else:
        results = torch_cpu.flash(heads, key, value, is_causal=causal, scale=scale)
    out, lse = results[:2]
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    sums = torch.stack([lse for _, lse in parts])
    lse = sums.logsumexp(0)
    weights = (sums - lse).exp()[..., None]
    out = sum(weight * out.float() for weight, (out, _) in zip(weights, parts, strict=True))
    return out.to(parts[0][0].dtype), lse
