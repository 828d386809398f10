"""The files of conf/model say of the engine's built-in models what these are."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import yaml

from spanlab.engine.builtin import BUILTIN
from spanlab.engine.load import ModelChoice, read_config
from spanlab.engine.model import spec_of
from spanlab.main import CONF
from spanlab.model_spec import ModelSpec

SHARED = sorted(BUILTIN.keys() & {path.stem for path in (CONF / "model").glob("*.yaml")})


def test_the_models_of_a_bare_machine_and_of_a_card_are_among_them():
    assert {"tiny", "llama-3.1-8b"} <= set(SHARED)


@pytest.mark.parametrize("name", SHARED)
def test_a_model_file_is_the_engines_own_model(name: str):
    told = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
    told.pop("defaults")
    found = spec_of(name, read_config(ModelChoice(name)), told["weight_itemsize"])
    assert asdict(ModelSpec(**told)) == asdict(found)
