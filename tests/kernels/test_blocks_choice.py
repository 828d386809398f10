"""Sizes of the attention kernel: fixed ones that fit their rows, and tuned ones that are stored for a card."""

import sys
from dataclasses import replace

import pytest
import torch

from spanlab_kernels.attention.kernel import Blocks, blocks, cache_file, choices, save_choices, variant

CARD = "a card"


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Cache file of tuned sizes: empty, for a CUDA device of the name CARD."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: CARD)
    choices.cache_clear()
    yield cache_file()
    choices.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_tiles_fit_their_rows(head_dim, dtype):
    for entries in (1, 4, 16, 17, 33, 64, 65, 5000):
        size = blocks(head_dim, dtype, entries)
        assert size.m >= min(entries, 32) and size.m & (size.m - 1) == 0 and size.m >= 16


def test_stored_sizes_apply_to_their_card_and_variant(card):
    fixed, other = blocks(128, torch.bfloat16, 4), Blocks(16, 128, 4, 2)
    assert blocks(128, torch.bfloat16, 4, "cuda") == fixed
    save_choices(CARD, {variant(128, torch.bfloat16, 4): other}, card)
    save_choices("another card", {variant(64, torch.bfloat16, 4): other}, card)
    assert blocks(128, torch.bfloat16, 13, "cuda") == other  # 16 pairs at most are one variant
    assert blocks(128, torch.bfloat16, 17, "cuda") == blocks(128, torch.bfloat16, 17)
    assert blocks(64, torch.bfloat16, 4, "cuda") == blocks(64, torch.bfloat16, 4)
    assert blocks(128, torch.bfloat16, 4, "cpu") == fixed


@pytest.mark.parametrize("text", ["no json", '{"a card": {"128 bfloat16 16": {"m": 16}}}', '{"a card": []}'])
def test_a_foreign_file_is_one_sentence(card, text):
    card.parent.mkdir(parents=True)
    card.write_text(text)
    with pytest.raises(ValueError, match=r"blocks\.json: expected sizes of blocks by card and variant, .*\.$"):
        blocks(128, torch.bfloat16, 4, "cuda")


class OutOfResources(Exception):  # noqa: N818
    """Triton's error for sizes that exceed the resources of a card."""


def test_fastest_sizes_fit_and_take_least():
    from spanlab_kernels.attention.tune import candidates, fastest

    fixed = blocks(128, torch.bfloat16, 1000)
    best = replace(fixed, n=32, stages=2)

    def seconds(size):
        if size.n == 128:
            raise OutOfResources
        return 1.0 if size == best else 2.0

    sizes = list(candidates(fixed))
    assert sizes[0] == fixed and len(set(sizes)) == len(sizes) == 11
    assert fastest(iter(sizes), seconds) == best
    with pytest.raises(OutOfResources):
        fastest(iter([replace(fixed, n=128)]), seconds)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_card_nothing_is_tuned(card, monkeypatch, capsys):
    from spanlab_kernels.attention import tune

    monkeypatch.setattr(sys, "argv", ["tune", "--head-dim", "128"])
    tune.main()
    assert capsys.readouterr().out == "not tuned: no CUDA device\n" and not card.exists()
