"""Embeddings are means over a text's tokens, do not depend on the batch, and rank passages by cosine."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from spanlab import dense_retrieval
from spanlab.dense_retrieval import Embedder, dense
from spanlab.model_files import EMBEDDER
from spanlab.workloads.questions import Query

WORDS = ("[PAD]", "[UNK]", "red", "fox", "owl", "night", "pond", "winter")
TEXTS = ["fox", "red fox red owl night", "pond winter", *(["night"] * 40), "owl fox pond"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder of two layers with a small vocabulary."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
    return folder


def test_embeddings_are_means_over_the_tokens_alone(folder):
    encoder = BertModel.from_pretrained(folder).eval()
    for text, embedding in zip(TEXTS, Embedder(folder)(TEXTS), strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        with torch.no_grad():
            mean = encoder(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0)
        torch.testing.assert_close(embedding, mean / mean.norm(), rtol=1e-4, atol=1e-5)


def test_a_passage_equal_to_the_question_ranks_first(folder, monkeypatch):
    class Package:
        def weights(self) -> Path:
            return folder / "model.safetensors"

    monkeypatch.setattr(dense_retrieval, "EMBEDDER", Package())
    passages = ["fox", "red fox red owl night", "pond winter"]
    assert [ranking[0] for ranking in dense(passages, [Query(text) for text in passages])] == [0, 1, 2]


@pytest.mark.slow
def test_the_packaged_embedder_ranks_by_meaning():
    if not EMBEDDER.is_installed:
        pytest.skip(f"needs the package {EMBEDDER.distribution}")
    passages = ["The king lived in a castle.", "A recipe for apple cake.", "The train was delayed by snow."]
    queries = [Query("Where was the ruler's home?"), Query("How does one bake?"), Query("Why was it late?")]
    assert [ranking[0] for ranking in dense(passages, queries)] == [0, 1, 2]
