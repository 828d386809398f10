"""A Llama in a few lines of plain torch, and reuse methods written down on it as their papers say: the brute force.

Nothing is packed, paged or cached; every prompt stands as one row of positions, and its keys and values as one bank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from spanlab.engine.model import SpanModel

Bank = tuple[list[Tensor], list[Tensor]]
"""Keys, unrotated, and values of every layer, each [N, Hkv, D]."""


class Plain:
    """The arithmetic of a Llama's layers on rows [T, hidden], in float64."""

    def __init__(self, model: SpanModel) -> None:
        self.weights = {name: weight.double() for name, weight in model.hf.state_dict().items()}
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
        """Query, key and value, unrotated, [T, heads, D]."""
        normed = self._norm(rows, self._weight("input_layernorm", layer))
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return [linear(normed, self._weight(name, layer)).unflatten(-1, (-1, self.dim)) for name in names]

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        angles = positions.double()[:, None, None] * self._speeds
        a, b = states.double().chunk(2, -1)
        rotated = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
        return rotated.to(states.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heat: float = 1.0):
        """Out [T, Hq, D] and log-sum-exp [T, Hq] of rotated states; scores are divided by `heat`."""
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
            out, _ = self.attend(self.rotate(query, positions), self.rotate(key, positions), value, mask)
            rows = self.finish(layer, rows, out)
        return keys, values


@dataclass(frozen=True)
class Selection:
    """CacheBlend's rule: `counts[layer]` free rows pass a layer whole; where fewer do, those that score highest.

    `score`   values, keys or both, in squared differences from the bank; or outside, the attention that a row gives to
              everything before its own span, which begins at prompt position `starts` [N]
    `inside`  rows leave a layer before its attention, by what it measured itself; else before the layer, by the last
    `writes`  all or chosen: whose keys and values a layer keeps that rows leave
    """

    counts: Sequence[int]
    score: str = "both"
    inside: bool = False
    writes: str = "all"
    starts: Tensor | None = None

    def narrows(self, layer: int) -> bool:
        """Whether fewer rows pass this layer whole than the one before."""
        return layer > 0 and self.counts[layer] < self.counts[layer - 1]

    def scores(self, keys: Tensor, values: Tensor) -> Tensor:
        """Per row, from differences [T, Hkv, D]."""
        parts = {"keys": [keys], "values": [values], "both": [keys, values]}[self.score]
        return sum(part.square().sum((1, 2)) for part in parts)


@dataclass
class Recompute:
    """Rows of a prompt computed again over a bank that holds stale ones.

    `fixed`  the prompt positions among them that are never left out
    `kept`   by layer, the positions that passed it whole
    `stands` what stored keys are rotated by, where that is not their place
    """

    plain: Plain
    ids: Tensor
    bank: Bank
    selection: Selection | None = None
    fixed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    kept: list[Tensor] = field(default_factory=list)
    stands: Tensor | None = None

    def run(self, places: Tensor) -> Tensor:
        """Compute rows layer by layer, writing their keys and values into the bank; logits of those that are left."""
        plain, rule, hidden = self.plain, self.selection, self.plain.embed(self.ids[places])
        everywhere, scores = torch.arange(len(self.ids)), torch.empty(0)
        for layer in range(plain.layers):
            narrows = rule is not None and rule.narrows(layer)
            if narrows and not rule.inside:
                best = self._best(places, scores, rule.counts[layer])
                places, hidden = places[best], hidden[best]
            query, key, value = plain.states(layer, hidden)
            keys, values = self.bank[0][layer], self.bank[1][layer]
            if rule is not None and rule.starts is not None:
                scores = self._outside(places, rule.starts, query, keys.index_copy(0, places, key))
            elif rule is not None:
                scores = rule.scores(key - keys[places], value - values[places])
            if narrows and rule.inside:
                best = self._best(places, scores, rule.counts[layer])
                if rule.writes == "all":
                    keys[places], values[places] = key, value
                places, hidden, query, key, value = (tensor[best] for tensor in (places, hidden, query, key, value))
            keys[places], values[places] = key, value
            mask = everywhere <= places[:, None]
            rotated = plain.rotate(query, places), plain.rotate(keys, self._stands)
            hidden = plain.finish(layer, hidden, plain.attend(*rotated, values, mask)[0])
            self.kept.append(places)
        return plain.logits(hidden)

    @property
    def _stands(self) -> Tensor:
        return torch.arange(len(self.ids)) if self.stands is None else self.stands

    def _outside(self, places: Tensor, starts: Tensor, query: Tensor, keys: Tensor) -> Tensor:
        """Per row, summed over heads: softmax weights of the text before its span."""
        everywhere = torch.arange(len(self.ids))
        rotated = self.plain.rotate(keys, self._stands).repeat_interleave(self.plain.group, 1)
        scores = torch.einsum("thd,nhd->thn", self.plain.rotate(query, places), rotated) / self.plain.dim**0.5
        weights = scores.masked_fill((everywhere > places[:, None])[:, None], -torch.inf).softmax(-1)
        return (weights * (everywhere < starts[places][:, None])[:, None]).sum((1, 2))

    def _best(self, places: Tensor, scores: Tensor, count: int) -> Tensor:
        fixed = torch.isin(places, self.fixed)
        order = scores.masked_fill(fixed, torch.inf).argsort(descending=True)
        return order[: count + int(fixed.sum())].sort().values


class Blended(NamedTuple):
    """Results of CacheBlend: logits of the rows after the last span, and the recomputed positions by layer."""

    logits: Tensor
    kept: list[Tensor]


def blend(plain: Plain, ids: Tensor, bank: Bank, again: Tensor, along: Tensor, tail: int, rule: Selection) -> Blended:
    """CacheBlend: rows [tail, N) after rows `again` were filtered by deviation, rows `along` always kept."""
    bank = tuple([states.clone() for states in part] for part in bank)
    work = Recompute(plain, ids, bank, rule, along)
    work.run(torch.cat([again, along]).sort().values)
    return Blended(Recompute(plain, ids, bank).run(torch.arange(tail, len(ids))), work.kept)


def ape_logits(
    plain: Plain, ids: Tensor, positions: Tensor, own: Tensor, spans: Tensor, heat: float, scale: float
) -> Tensor:
    """APE on a whole prompt: `own` is the mask of rows that read plainly, `spans` marks the rows of contexts.

    Ordered rows read contexts with scores divided by T, and give them the weight exp(S · T · lse).
    """
    rows, causal = plain.embed(ids), torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    for layer in range(plain.layers):
        query, key, value = plain.states(layer, rows)
        query, key = plain.rotate(query, positions), plain.rotate(key, positions)
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
