"""Studies for the report tests, made once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _studies() -> ModuleType:
    # the tests are no package, so a module beside them is loaded by its path
    spec = importlib.util.spec_from_file_location("report_studies", Path(__file__).with_name("studies.py"))
    assert spec, "studies.py is missing"
    assert spec.loader, "studies.py has no loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules["report_studies"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def studies() -> ModuleType:
    """The factory itself, for tests that build their own study."""
    return _studies()


@pytest.fixture(scope="session")
def full(studies):
    """36 arms, three seeds, 863 requests each, a budget of 16 GiB."""
    return studies.make_study()


@pytest.fixture(scope="session")
def degenerate(studies):
    """Small and empty studies by name."""
    return studies.make_degenerate()
