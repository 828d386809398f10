"""Tests compose with a memo: it gives what Hydra gives."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from spanlab.cli import _composed
from spanlab.settings.composition import as_settings

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
    with composing(memo.steps):
        first = _composed(entry, groups)
        first.seeds = [99]
        again = _composed(entry, list(CASES[entry]))
    with composing(HYDRA):
        expected = _composed(entry, list(CASES[entry]))
    assert memo.reused == 1
    assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(expected)
    assert as_settings(again) == as_settings(expected)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("smoke", "model=tiny-hybrid"), ("smoke", "model=qwen3.5-27b", "store=gib_64")),
        (("quality_sim",), ("pic_sim", "arms=methods")),
        (("quality_sim",), ("quality_sim", "hardware=rtx4090", "+strategy@arms.mine=dp")),
    ],
)
def test_lists_that_part_are_merged_as_hydra_merges(first, then):
    """Three times: the second stores the common part, and the third starts from it."""
    memo = Compositions()
    with composing(memo.steps):
        for entry, *groups in (first, then):
            _composed(entry, groups)
        third = _composed(then[0], [*then[1:], "tracking=none"])
        third.seeds = [99]
        continued = _composed(then[0], [*then[1:], "executor=here"])
    with composing(HYDRA):
        expected = _composed(then[0], [*then[1:], "executor=here"])
    assert memo.continued
    assert OmegaConf.to_yaml(continued) == OmegaConf.to_yaml(expected)
    assert as_settings(continued) == as_settings(expected)


def test_the_memo_keeps_nothing_of_files_that_may_change(tmp_path):
    (tmp_path / "store").mkdir()
    memo = Compositions()
    with composing(memo.steps):
        for gib in (3, 4):
            (tmp_path / "store" / "mine.yaml").write_text(f"total_gib: {gib}\n")
            assert _composed("smoke", ["store=mine"], str(tmp_path)).store.total_gib == gib
    assert memo.reused == 0
