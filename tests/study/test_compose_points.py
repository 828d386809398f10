"""Points of a sweep equal the command line's composition, cached or not."""

from dataclasses import asdict

import hydra
import pytest

from spanlab.cli import register
from spanlab.compiled import CONF
from spanlab.settings.composition import as_settings, compose_entry
from spanlab.study.sweep import PointComposer

GIVEN = ("seeds=[0,1]", "store.total_gib=3")


def composed(*overrides: str):
    return as_settings(compose_entry("smoke", [*GIVEN, *overrides]))


@pytest.fixture
def composer():
    register()
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        yield PointComposer("smoke", [*GIVEN, 'sweep=["arrivals.rate_rps=1,2"]'], as_settings)


@pytest.mark.parametrize(
    "overrides",
    [
        ["arrivals.rate_rps=2"],
        ["only=[none]", "workload.max_prompt_tokens=null"],
        ["arms.none.block_size=32"],
        ["store=gib_64"],
        ["+strategy@arms.mine=block_hash"],
    ],
    ids=" ".join,
)
def test_a_point_is_what_the_command_line_composes(composer, overrides):
    assert asdict(composer(*overrides)) == asdict(composed(*overrides))


def test_a_point_replaces_what_the_command_line_gave(composer):
    assert composer("store.total_gib=7").store.total_gib == 7.0


def test_one_point_leaves_no_trace_in_the_next(composer):
    composer("only=[none]")
    assert composer("arrivals.rate_rps=2").runs.only == composed().runs.only


@pytest.mark.parametrize(
    ("override", "error"), [("arrivals.rate=2", ValueError), ("arrivals.rate_rps=fast", ValueError)]
)
def test_a_full_composition_explains_a_mistake(composer, override, error):
    with pytest.raises(error, match=r"arrivals\.rate"):
        composer(override)
