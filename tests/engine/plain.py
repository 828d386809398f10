"""A Llama in a few lines of plain torch, and reuse methods written down on it as their papers say: the brute force.

Nothing is packed, paged or cached; every prompt stands as one row of positions, and its keys and values as one bank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from spanlab.engine.model import SpanModel

Bank = tuple[list[Tensor], list[Tensor]]
"""Keys, unturned, and values of every layer, each [N, Hkv, D]."""


class Plain:
    """The arithmetic of a Llama's layers on rows [T, hidden]."""

    def __init__(self, model: SpanModel) -> None:
        self.weights = model.hf.state_dict()
        self.layers, self.eps = model.layers, model.config.rms_norm_eps
        self.group, self.dim = model.query_heads // model.kv_heads, model.head_dim
        theta = model.config.rope_parameters["rope_theta"]
        self._speeds = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)

    def _weight(self, name: str, layer: int) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps) * weight

    def embed(self, ids: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][ids]

    def states(self, layer: int, rows: Tensor) -> list[Tensor]:
        """Query, key and value, unturned, [T, heads, D]."""
        normed = self._norm(rows, self._weight("input_layernorm", layer))
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return [linear(normed, self._weight(name, layer)).unflatten(-1, (-1, self.dim)) for name in names]

    def turn(self, states: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double()[:, None, None] * self._speeds
        a, b = states.double().chunk(2, -1)
        turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        return turned.to(states.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heat: float = 1.0):
        """Out [T, Hq, D] and log-sum-exp [T, Hq] of turned states; scores are divided by `heat`."""
        key, value = (states.repeat_interleave(self.group, 1) for states in (key, value))
        scores = torch.einsum("thd,nhd->thn", query, key) / (self.dim**0.5 * heat)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        shares = torch.where(mask.any(-1)[:, None, None], (scores - lse[..., None]).exp(), 0.0)
        return torch.einsum("thn,nhd->thd", shares, value), lse

    def finish(self, layer: int, rows: Tensor, out: Tensor) -> Tensor:
        rows = rows + linear(out.flatten(1), self._weight("self_attn.o_proj", layer))
        normed = self._norm(rows, self._weight("post_attention_layernorm", layer))
        gate, up = (linear(normed, self._weight(f"mlp.{name}_proj", layer)) for name in ("gate", "up"))
        return rows + linear(silu(gate) * up, self._weight("mlp.down_proj", layer))

    def logits(self, rows: Tensor) -> Tensor:
        return linear(self._norm(rows, self.weights["model.norm.weight"]), self.weights["lm_head.weight"])

    def bank(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Bank:
        """Keys and values of a whole forward under a mask."""
        rows, keys, values = self.embed(ids), [], []
        for layer in range(self.layers):
            query, key, value = self.states(layer, rows)
            keys.append(key)
            values.append(value)
            out, _ = self.attend(self.turn(query, positions), self.turn(key, positions), value, mask)
            rows = self.finish(layer, rows, out)
        return keys, values


@dataclass
class Recompute:
    """Rows of a prompt computed again over a bank that holds stale ones, and what was measured on the way.

    `choose(layer, deviation)`  asked before every layer but the first: which rows, among those that reach it, go on
    """

    plain: Plain
    ids: Tensor
    bank: Bank
    deviations: dict[int, Tensor] = field(default_factory=dict)

    def run(self, rows: Tensor, choose: Callable[[int, Tensor], Tensor | None] | None = None) -> Tensor:
        """Compute `rows` layer by layer, writing their keys and values into the bank; logits of those that are left."""
        plain, places, hidden = self.plain, rows, self.plain.embed(self.ids[rows])
        everywhere = torch.arange(len(self.ids))
        for layer in range(plain.layers):
            if layer and choose is not None:
                kept = choose(layer, self.deviations[layer - 1])
                if kept is not None:
                    places, hidden = places[kept], hidden[kept]
            query, key, value = plain.states(layer, hidden)
            keys, values = self.bank[0][layer], self.bank[1][layer]
            difference = (key - keys[places]).square() + (value - values[places]).square()
            self.deviations[layer] = difference.sum((1, 2))
            keys[places], values[places] = key, value
            mask = everywhere <= places[:, None]
            turned = plain.turn(query, places), plain.turn(keys, everywhere)
            hidden = plain.finish(layer, hidden, plain.attend(*turned, values, mask)[0])
        return plain.logits(hidden)


def blend(
    plain: Plain, ids: Tensor, bank: Bank, again: Tensor, along: Tensor, tail: int, counts: Sequence[int]
) -> Tensor:
    """CacheBlend: logits of rows [tail, N) after rows `again` were filtered by deviation, rows `along` always kept.

    `counts[layer]` of the rows `again` are computed in a layer; equal numbers in two layers keep the same ones.
    """
    work = Recompute(plain, ids, tuple([states.clone() for states in part] for part in bank))
    rows, order = torch.cat([again, along]).sort()
    fixed = order >= len(again)

    def choose(layer: int, deviation: Tensor) -> Tensor | None:
        nonlocal fixed
        if counts[layer] == counts[layer - 1]:
            return None
        wanted = deviation.masked_fill(fixed, torch.inf).argsort(descending=True)[: counts[layer] + int(fixed.sum())]
        kept = wanted.sort().values
        fixed = fixed[kept]
        return kept

    work.run(rows, choose)
    return work.run(torch.arange(tail, len(ids)))


def ape_logits(
    plain: Plain, ids: Tensor, positions: Tensor, own: Tensor, spans: Tensor, heat: float, scale: float
) -> Tensor:
    """APE on a whole prompt: `own` is the mask of rows that read plainly, `spans` marks the rows of contexts.

    Ordered rows read contexts with scores divided by T, and give them the weight exp(S · T · lse).
    """
    rows, causal = plain.embed(ids), torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for layer in range(plain.layers):
        query, key, value = plain.states(layer, rows)
        query, key = plain.turn(query, positions), plain.turn(key, positions)
        alone, _ = plain.attend(query, key, value, own)
        text, text_lse = plain.attend(query, key, value, causal & ~spans)
        far, far_lse = plain.attend(query, key, value, causal & spans, heat)
        far_lse = scale * heat * far_lse
        share = torch.sigmoid(text_lse - far_lse)[..., None]
        mixed = share * text + (1 - share) * far
        rows = plain.finish(layer, rows, torch.where(spans[:, None, None], alone, mixed))
    return plain.logits(rows)


def linear_counts(layers: int, first: int, count: int, total: int) -> list[int]:
    """Rows of each layer with gradual filtering: all of them before `first`, then evenly from 1.5 to 0.5 of `count`."""
    spread = min(0.5, (total - count) / count) if count else 0.0
    falling = np.linspace(1 + spread, 1 - spread, layers - first) * count
    return [total] * first + [round(float(number)) for number in falling]
