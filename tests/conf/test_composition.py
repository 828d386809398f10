"""Tests take composed entries from a cache, which gives what Hydra gives."""

import hydra
import pytest
from omegaconf import OmegaConf

from spanlab.cli import _composed
from spanlab.compiled import CONF
from spanlab.settings.composition import as_settings, compose_entry

from ..support.composition import Compositions, composing


@pytest.mark.parametrize(
    ("entry", "overrides"),
    [
        ("smoke", ["tracking=none", "seeds=[3]", "store.total_gib=2"]),
        ("quality_sim", ["+strategy@arms.mine=dp", "arms.mine.placement.count=7", "hardware=rtx4090"]),
        ("pic_bench", ["engine={record: tokens}", "model=tiny-qwen3"]),
    ],
)
def test_the_cache_composes_as_hydra(entry, overrides):
    cache = Compositions()
    with composing(cache):
        _composed(entry, overrides).runs.seeds = [99]
        again = _composed(entry, overrides)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        expected = compose_entry(entry, overrides)
    assert len(cache.composed) == 1
    assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(expected)
    assert as_settings(again) == as_settings(expected)


def test_the_cache_keeps_nothing_of_folders_that_may_change(tmp_path):
    (tmp_path / "store").mkdir()
    for gib in (3, 4):
        (tmp_path / "store" / "mine.yaml").write_text(f"total_gib: {gib}\n")
        assert _composed("smoke", ["store=mine"], str(tmp_path)).store.total_gib == gib
