"""Studies for the report tests, built once per session."""

from types import ModuleType

import pytest

from . import studies as factory


@pytest.fixture(scope="session")
def studies() -> ModuleType:
    """The module of factories, for tests that build a study."""
    return factory


@pytest.fixture(scope="session")
def full(studies):
    """36 arms, three seeds, 863 requests each, a budget of 16 GiB."""
    return studies.make_study()


@pytest.fixture(scope="session")
def degenerate(studies):
    """Small and empty studies by name."""
    return studies.make_degenerate()
