"""Dense retrieval: passages by the cosine between their embedding and the question's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanlab.model_files import EMBEDDER
from spanlab.workloads.questions import RETRIEVERS, Ints, Query, rank_by_score

if TYPE_CHECKING:
    from torch import Tensor

#: Maximum tokens of a text that the embedder was trained on; later tokens are truncated.
MAX_TOKENS = 256
_BATCH = 32


@RETRIEVERS.register("dense")
def dense(passages: Sequence[str], queries: Sequence[Query]) -> list[Ints]:
    """Rank passages by cosines of all-MiniLM-L6-v2 embeddings: means over the first 256 tokens of a
    text."""
    embedder = _embedder(EMBEDDER.weights().parent)
    scores = embedder([query.text for query in queries]) @ embedder(passages).T
    return [rank_by_score(row.numpy()) for row in scores]


class Embedder:
    """Embeddings of texts by a Hugging Face folder of an encoder."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        from spanlab.engine.hook import no_weight_bars

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        with no_weight_bars():
            self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return unit vectors, float32 [len(texts), width]: means over the tokens of each text,
        without padding."""
        import torch

        # Batches of similar lengths need little padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        batches = [order[start : start + _BATCH] for start in range(0, len(texts), _BATCH)]
        vectors = []
        for batch in batches:
            encoded = self._tokenizer(
                [texts[index] for index in batch],
                padding=True,
                truncation=True,
                max_length=MAX_TOKENS,
                return_tensors="pt",
            )
            with torch.no_grad():
                states = self._model(**encoded).last_hidden_state
            mask = encoded["attention_mask"][..., None]
            means = (states * mask).sum(1) / mask.sum(1)
            vectors.append(torch.nn.functional.normalize(means, dim=-1))
        return torch.cat(vectors)[torch.tensor(order).argsort()]


_embedder = cache(Embedder)
