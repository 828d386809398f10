"""Settings of every test."""

import os
from collections.abc import Iterator

import pytest

from .support.composition import Compositions, composing

# Tests look into Python modules; tests/architecture/test_compiled.py runs a part of them on compiled ones.
os.environ.setdefault("SPANLAB_COMPILED", "never")


@pytest.fixture(scope="session", autouse=True)
def compositions() -> Iterator[Compositions]:
    """What was composed so far in this process."""
    memo = Compositions()
    with composing(memo.create, memo.merge):
        yield memo
