"""An entry that is composed again takes its files from memory, and equals what Hydra composes."""

import hydra
import pytest
from omegaconf import OmegaConf

from spanlab.cli import _composed
from spanlab.compiled import CONF
from spanlab.settings.composition import as_settings, full_words, with_sections


@pytest.mark.parametrize(
    ("entry", "overrides"),
    [
        ("smoke", ["tracking=none", "seeds=[3]", "store.total_gib=2"]),
        ("smoke", ["arms.none.block_size=32", "~arms.kv_only", "arms.boundary.block_size=64"]),
        ("smoke", ["store.total_gib=2", "++store.total_gib=3"]),
        ("smoke", ["workload.documents=3", "workload={documents: 4}"]),
        ("quality_sim", ["+strategy@arms.mine=dp", "arms.mine.placement.count=7", "hardware=rtx4090"]),
        ("pic_bench", ["engine={record: tokens}", "model=qwen3-8b"]),
    ],
)
def test_a_second_composition_equals_hydras(entry, overrides):
    _composed(entry, overrides).runs.seeds = [99]
    again = _composed(entry, overrides)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        expected = hydra.compose(entry, with_sections(full_words(entry, overrides)))
    assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(expected)
    assert as_settings(again) == as_settings(expected)


def test_a_second_composition_reads_no_files(monkeypatch):
    _composed("smoke", ["store=gib_64"])
    monkeypatch.setattr(hydra, "compose", None)
    assert _composed("smoke", ["store=gib_64", "seeds=[4]"]).runs.seeds == [4]


def test_a_changed_file_is_read_again(tmp_path):
    (tmp_path / "store").mkdir()
    for gib in (3, 4):
        (tmp_path / "store" / "mine.yaml").write_text(f"total_gib: {gib}\n")
        assert _composed("smoke", ["store=mine"], str(tmp_path)).store.total_gib == gib
