"""Profiles of tests are kept, however busy the machine is."""

from __future__ import annotations

import pytest
from spanlab.calibrate import profiles


@pytest.fixture(autouse=True)
def any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that no measurement exceeds."""
    monkeypatch.setattr(profiles, "LEFT_OUT_LIMIT", float("inf"))
