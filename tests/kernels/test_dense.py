"""Libraries for a prefill over contiguous keys: each is called as documented, and agrees with torch."""

import inspect
import math
import sys
import types
from itertools import pairwise

import pytest
import torch

from spanlab_kernels.attention import triton
from spanlab_kernels.testing import random_tensor

ROWS, KEYS = (0, 3, 4, 9), (0, 3, 8, 20)
SEQUENCES = triton.Sequences(ROWS, KEYS, *(torch.tensor(starts, dtype=torch.int32) for starts in (ROWS, KEYS)))


def inputs():
    return random_tensor(9, 4, 16), *(random_tensor(20, 2, 16, seed=seed) for seed in (1, 2))


def by_formula(query, key, value, rows, keys, scale):
    """Out and lse, one sequence at a time, every score in float64."""
    outs, sums = [], []
    for (first, last), key_range in zip(pairwise(rows), pairwise(keys), strict=True):
        k, v = (x[slice(*key_range)].double().repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = scale * torch.einsum("rhd,khd->rhk", query[first:last].double(), k)
        unseen = torch.ones(last - first, len(k), dtype=torch.bool).triu(len(k) - (last - first) + 1)
        scores = scores.masked_fill(unseen[:, None], -torch.inf)
        outs.append(torch.einsum("rhk,khd->rhd", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    """The documented signature of flash-attn 2.6 to 2.8; sums are [heads, rows]."""
    assert causal and return_attn_probs and (max_seqlen_q, max_seqlen_k) == (5, 12)
    out, sums = by_formula(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale)
    return out.to(q.dtype), sums.T.float(), None


class BatchPrefillWithRaggedKVCacheWrapper:
    """The documented methods of FlashInfer, without the arguments that are not used here; sums are to base 2."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, *, causal=False, sm_scale=None,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 16)
        self.starts, self.scale = (qo_indptr.tolist(), kv_indptr.tolist()), sm_scale

    def run(self, q, k, v, *, return_lse=False):
        assert return_lse
        out, sums = by_formula(q, k, v, *self.starts, self.scale)
        return out.to(q.dtype), (sums / math.log(2)).float()


@pytest.fixture
def installed(monkeypatch):
    """Stand-ins with the documented signatures of the libraries."""
    for module, name in (("flash_attn", flash_attn_varlen_func), ("flashinfer", BatchPrefillWithRaggedKVCacheWrapper)):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name.__name__: name}))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", triton.LIBRARIES)
def test_library_is_causal_attention_of_each_sequence(name):
    query, key, value = inputs()
    results = triton.LIBRARIES[name].attend(query, key, value, SEQUENCES, 0.3)
    for x, y in zip(results, by_formula(query, key, value, ROWS, KEYS, 0.3), strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-5, rtol=1e-5)


def test_first_installed_library_is_selected(monkeypatch):
    on_device = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    installed_modules = {"flashinfer"}
    monkeypatch.setattr(triton, "_is_installed", installed_modules.__contains__)
    assert triton.select_library(on_device) is triton.LIBRARIES["flashinfer"]
    installed_modules.add("flash_attn")
    assert triton.select_library(on_device) is triton.LIBRARIES["flash_attn"]
    installed_modules.clear()
    assert triton.select_library(on_device) is triton.LIBRARIES["sdpa"]
    assert triton.select_library(types.SimpleNamespace(is_cuda=True, dtype=torch.float32)) is None


def test_torch_has_the_operations_that_are_called():
    operations = torch.ops.aten
    on_device, on_cpu = (
        operations._scaled_dot_product_flash_attention.default,
        operations._scaled_dot_product_flash_attention_for_cpu.default,
    )
    names = [argument.name for argument in on_device._schema.arguments]
    assert names == ["query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert {"is_causal", "scale"} <= {argument.name for argument in on_cpu._schema.arguments}
    assert not inspect.isabstract(triton.Sdpa)
