"""Short names of a study's keys: each sets its full key, errors and comparisons have them, files do not."""

from dataclasses import fields
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.settings.analyses import ANALYSES, SHORT_NAMES, full_key, short_key, with_short_keys
from spanlab.settings.study import Study
from spanlab.study.folder import first_difference


def value_of(study: Study, key: str) -> object:
    value: object = study
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_a_study_has_eighteen_sections():
    assert len(fields(Study)) == 18


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_a_short_name_is_a_key_and_comes_back(name: str):
    assert short_key(SHORT_NAMES[name]) == name
    assert full_key(f"{name}.x") == (f"{SHORT_NAMES[name]}.x" if name != "analyses" else "analyses.x")
    value_of(compose("smoke", []), SHORT_NAMES[name])


@pytest.mark.parametrize(
    ("short", "full", "value"),
    [
        ("seeds=[3]", "runs.seeds", [3]),
        ("load.rates_rps=[]", "runs.load.rates_rps", []),
        ("workers=1", "executor.workers", 1),
        ("analyses=[summary]", "analyses.names", ["summary"]),
        ("replay.timeout_s=5", "server.timeout_s", 5.0),
        ("design.shapes=7", "analyses.compare_backends.shapes", 7),
        ("bars.thrash=[none]", "analyses.bars.arms", {"thrash": ["none"]}),
    ],
)
def test_both_names_set_the_same_key(short: str, full: str, value: object):
    key, _, given = short.partition("=")
    sign = "+" * key.startswith("bars.")  # a new name among others
    for word in (f"{sign}{short}", f"{sign}{full_key(key)}={given}"):
        assert value_of(compose("smoke", [word]), full) == value


def test_options_of_an_analysis_that_is_not_chosen_are_refused():
    sentence = r"plan\.points=7 with analyses=\['summary'\]: expected plan among them"
    with pytest.raises(ValueError, match=sentence):
        compose("smoke", ["analyses=[summary]", "analyses.plan.points=7"])
    with pytest.raises(ValueError, match="analyses=pln: expected one of"):
        compose("smoke", ["analyses.pln.points=7"])


def test_every_option_has_a_type_of_its_own():
    schemas = [ANALYSES[name].options for name in ANALYSES if ANALYSES[name].options is not None]
    assert len(set(schemas)) == len(schemas) == 10


def test_an_earlier_run_folder_has_the_same_settings():
    """Earlier versions stored short names; a resumed run compares with them."""
    earlier = "arms: {}\nseeds: [0, 1]\nload: {shares: [0.5]}\nslo: {ttft_p95_s: 1.0}\n# requests: a\n"
    now = (
        "arms: {}\nruns: {seeds: [0, 1], load: {shares: [0.5]}}\n"
        "analyses: {plan: {slo: {ttft_p95_s: 1.0}}}\n# requests: a\n"
    )
    assert first_difference(earlier, now) == ""
    assert first_difference(earlier, now.replace("[0, 1]", "[0, 2]")) == "seeds: [0, 1] there, seeds: [0, 2] now"


def test_sentences_have_short_names():
    text = with_short_keys(
        "analyses.plan.slo.ttft_p95_s=x, runs.seeds[0]=y with backend=server: expected server.prompts"
    )
    assert text == "slo.ttft_p95_s=x, seeds[0]=y with backend=server: expected server.prompts"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("seeds: [0]", "seeds: a short name, for the command line; expected in a file runs > seeds"),
        ("analyses: [plan]", "entry mine: a list where a section stands; expected KEY: {...}"),
        ("slo: {e2e_p50_s: 1}", "slo: a short name, for the command line; expected in a file analyses > plan > slo"),
    ],
)
def test_a_file_sets_full_keys(spanlab, one_sentence, tmp_path: Path, line: str, sentence: str):
    (tmp_path / "mine.yaml").write_text(f"defaults: [smoke, _self_]\n{line}\n")
    one_sentence(spanlab("--config-dir", str(tmp_path), "-cn", "mine", "--dry"), sentence)
