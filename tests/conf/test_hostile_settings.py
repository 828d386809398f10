"""Hostile settings end with one sentence: every optional section, and random keys with random values."""

import os
import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from spanlab import cli
from spanlab.cli import _composed, compose, entries
from spanlab.errors import USER_ERRORS
from spanlab.settings.composition import optional_sections, schema_of, with_sections, without_sections

from ..support.hostile_values import Ended, Key, forbidden, forked, hostile, keys_of

SEED = int(os.environ.get("SPANLAB_HOSTILE_SEED", "0"))
PER_ENTRY = 20  # more than a thousand in all
MISTAKES = (
    *(("nope=1",), ("nope",), ("=1",), ("seeds",), ("a=b=c",), ("seeds=[",), ("~nope",)),
    *(("nope@a=b",), ("hydra.nope=1",), ("--nope",), ("-cn", "nope"), ("--cfg", "nope"), ("--config-dir", "/nope")),
)


def _keys(config: DictConfig) -> list[Key]:
    arms = list(config.get("arms") or ["none"])
    return list(keys_of(schema_of(config), {"arms": arms[0]}))


def test_sections_are_created_once_and_leave_names_alone():
    given = ["arms.a.spans.maps.rank=2", "arms.a.pool={cut:true}", "arms.a.pool=null", "seeds=[1]"]
    created = with_sections(given)
    assert created == [
        *("arms.a={spans:{maps:{}}}", "arms.a.spans.maps.rank=2"),
        *("arms.a={pool:{}}", "arms.a.pool={cut:true}", "arms.a.pool=null", "seeds=[1]"),
    ]
    assert without_sections(",".join(created)) == ",".join(given)


def test_one_key_switches_an_optional_section_on():
    only = ["only=[none]", "load.rates_rps=[]", "load.arms=[]", "arms.none.pool.block_size=64", "arms.none.keep=true"]
    pool = compose("smoke", only).arms["none"].pool
    assert (pool.block_size, pool.retention, pool.junctions) == (64, 0, True)


def test_unread_lists_may_name_arms_of_other_choices():
    study = compose("smoke", ["arms=attention", "model=llama-3.2-1b", "load.rates_rps=[]"])
    assert study.runs.load.arms == ["none", "dp_3"]
    assert "dp_3" not in study.arms


def _refused_or_settings(entry: str, override: str) -> None:
    with suppress(*USER_ERRORS):  # any other error is a fault
        compose(entry, [override])


def _below(section: str, keys: list[Key]) -> str:
    """Return KEY=VALUE of the first plain key below a section."""
    plain = [key for key in keys if key.name.startswith(f"{section}.") and not key.section]
    return f"{plain[0].name}=1"


def _null_sections(config: DictConfig) -> list[str]:
    keys = _keys(config)
    return [_below(key.name, keys) for key in keys if key.optional and key.section]


def test_every_null_section_takes_a_key_in_one_study():
    overrides = _null_sections(_composed("smoke", []))
    assert len(overrides) == len(optional_sections())
    for override in overrides:
        _refused_or_settings("smoke", override)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries())
def test_every_null_section_takes_a_key(entry):
    for override in _null_sections(_composed(entry, [])):
        _refused_or_settings(entry, override)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries())
def test_random_hostile_settings_get_one_sentence(entry):
    """SPANLAB_HOSTILE_SEED chooses other settings."""
    keys = _keys(_composed(entry, []))
    draws = random.Random(f"{entry} {SEED}").randrange(1 << 30)
    for override in hostile(keys, PER_ENTRY, draws):
        ended = _ended("-cn", entry, override, "--dry")
        assert not ended.fault, (entry, override, ended)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries())
def test_values_of_no_use_are_refused(entry):
    """SPANLAB_HOSTILE_SEED chooses other settings."""
    keys = [key for key in _keys(_composed(entry, [])) if forbidden(key)]
    draw = random.Random(f"{entry} {SEED}")
    for key in draw.choices(keys, k=PER_ENTRY):
        override = f"{key.name}={draw.choice(forbidden(key))}"
        ended = _ended("-cn", entry, override, "--dry")
        assert ended.code == 1, (entry, override, ended)
        assert not ended.fault, (entry, override, ended)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries())
def test_mistakes_of_a_command_get_one_sentence(entry):
    for words in MISTAKES:
        ended = _ended("-cn", entry, *words, "--dry")
        assert ended.code == 1, (entry, words, ended)
        assert not ended.fault, (entry, words, ended)


def _ended(*words: str) -> Ended:
    """Call the console script's function in a fork of this process."""

    def call() -> None:
        GlobalHydra.instance().clear()
        sys.argv = ["spanlab", *words]
        cli.main()

    return forked(call)


def test_an_entry_without_a_schema_says_what_it_lacks(spanlab, one_sentence, tmp_path):
    (tmp_path / "mine.yaml").write_text("seeds: [0]\n")
    words = ("defaults: expected in the entry's list an entry to extend, such as smoke, or one of base_",)
    for more in ([], ["--dry"], ["--help"]):
        one_sentence(spanlab("--config-dir", str(tmp_path), "-cn", "mine", *more), *words)


def test_a_folder_of_choices_that_is_missing_is_refused(spanlab, one_sentence, tmp_path):
    for more in ([], ["--dry"]):
        one_sentence(spanlab("--config-dir", str(tmp_path / "no"), "-cn", "smoke", *more), "--config-dir=", "a folder")


def _bomb(folder: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * 9)}]" for at in range(1, 12)]
    (folder / "mine.yaml").write_text("\n".join(lines))


@pytest.mark.parametrize("text", [None, "a: &a [*a]\n"], ids=["doubled", "inside itself"])
def test_aliases_without_bound_are_refused(spanlab, one_sentence, tmp_path, text):
    _bomb(tmp_path) if text is None else (tmp_path / "mine.yaml").write_text(text)
    said = spanlab("--config-dir", str(tmp_path), "-cn", "mine", "--dry")
    one_sentence(said, str(tmp_path / "mine.yaml"), "aliases expand to more than 100000 values")


def test_a_wrong_option_of_hydra_gets_one_sentence(spanlab, one_sentence):
    one_sentence(spanlab("-cn", "smoke", "--cfg", "nope"), "--cfg/-c: invalid choice: 'nope'")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "device=cpu",
            ("device: entry conformance has no such group", "mean engine.device?", "with device: checkpoint"),
        ),
        ("workload.kind=rag", ("workload: no such key; expected one of model", "entries with workload: batch_sim")),
    ],
)
def test_a_key_of_other_entries_names_them(spanlab, one_sentence, key, words):
    one_sentence(spanlab("-cn", "conformance", key, "--dry"), *words)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("store.total_gib=1,-1", ("sweep=['store.total_gib=1,-1']: store.total_gib=-1: store.total_gib=-1.0", "zero")),
        ("arms.dp_3.pool.block_size=16,32", ("sweep=", "arms.dp_3.placement", "a pool of blocks has no such choice")),
    ],
)
def test_a_dry_run_composes_the_points_of_a_sweep(spanlab, one_sentence, sweep, words):
    one_sentence(spanlab("-cn", "smoke", "--dry", f'sweep=["{sweep}"]'), *words)
