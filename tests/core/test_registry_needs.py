"""Inputs that a registered name needs are declared where it is announced or registered."""

from __future__ import annotations

from spanlab.registry import Registry, file_of


def mine() -> int:
    return 1


def test_needs_are_those_of_the_announcement_or_the_file():
    registry: Registry[int] = Registry("numbers")
    registry.later("announced", "nowhere", needs=("arms", "labels"))
    registry.register("mine", needs=("arms",))(mine)
    assert registry.needing("arms") == ["announced", "mine"]
    assert registry.needing("labels") == ["announced"]
    registry.register("announced")(mine)
    assert registry.needing("labels") == ["announced"]


def test_a_forgotten_file_needs_nothing():
    registry: Registry[int] = Registry("numbers")
    registry.register("mine", needs=("arms",))(mine)
    registry.forget(file_of(mine))
    assert registry.needing("arms") == []
    registry.register("mine")(mine)
    assert registry.needing("arms") == []
