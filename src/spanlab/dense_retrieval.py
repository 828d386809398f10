"""Dense retrieval: passages by the cosine between their embedding and the question's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from spanlab.engine.weight_bars import no_weight_bars
from spanlab.models.packaged import EMBEDDER
from spanlab.workloads.questions.retrievers import RETRIEVERS, Ints, Query, by_score

#: Tokens of a text that the embedder was trained on; what follows is not seen.
MAX_TOKENS = 256
_BATCH = 32


@RETRIEVERS.register("dense")
def dense(passages: Sequence[str], queries: Sequence[Query]) -> list[Ints]:
    """Cosines of all-MiniLM-L6-v2's embeddings, a mean over tokens; of a passage the first 256 tokens are seen."""
    embedder = _embedder(EMBEDDER.weights().parent)
    scores = embedder([query.text for query in queries]) @ embedder(passages).T
    return [by_score(row.numpy()) for row in scores]


class Embedder:
    """Embeddings of texts by a Hugging Face folder of an encoder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        with no_weight_bars():
            self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors, float32 [len(texts), width]; the mean over a text's tokens, padding left out."""
        # Texts of like lengths together, so that little is padded.
        order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
        found = [self._embedded([texts[at] for at in order[start : start + _BATCH]]) for start in _starts(len(texts))]
        return torch.cat(found)[torch.tensor(order).argsort()]

    @torch.no_grad()
    def _embedded(self, texts: list[str]) -> Tensor:
        told = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        states, mask = self._model(**told).last_hidden_state, told["attention_mask"][..., None]
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def _starts(count: int) -> range:
    return range(0, count, _BATCH)


_embedder = cache(Embedder)
