"""Tests compose with a memo: it gives what Hydra gives."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from spanlab.main import _composed, as_settings

from ..support.composition import HYDRA, Compositions, composing

CASES = {
    "smoke": ("tracking=none", "seeds=[3]", "store.total_gib=2"),
    "pic_bench": ("model=tiny-qwen3", "only=[radix]"),
    "quality_sim": ("+strategy@arms.mine=dp", "arms.mine.placement.count=7"),
}


@pytest.mark.parametrize("entry", CASES)
def test_the_memo_composes_as_hydra(entry):
    memo = Compositions()
    groups = [word for word in CASES[entry] if "." not in word.partition("=")[0] or word.startswith("+")]
    with composing(memo.create, memo.merge):
        first = _composed(entry, groups)
        first.seeds = [99]
        again = _composed(entry, list(CASES[entry]))
    with composing(*HYDRA):
        expected = _composed(entry, list(CASES[entry]))
    assert memo.reused == 1
    assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(expected)
    assert as_settings(again) == as_settings(expected)


def test_the_memo_keeps_nothing_of_files_that_may_change(tmp_path):
    (tmp_path / "store").mkdir()
    memo = Compositions()
    with composing(memo.create, memo.merge):
        for gib in (3, 4):
            (tmp_path / "store" / "mine.yaml").write_text(f"total_gib: {gib}\n")
            assert _composed("smoke", ["store=mine"], str(tmp_path)).store.total_gib == gib
    assert memo.reused == 0
