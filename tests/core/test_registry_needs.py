"""Inputs that a registered name needs are declared where it is registered."""

from spanlab.registry import Registry, file_of


def mine() -> int:
    return 1


def test_names_and_needs_come_in_the_declared_order():
    registry: Registry[int] = Registry("numbers", order=("first", "absent", "second"))
    registry.register("mine", needs=("arms",))(mine)
    registry.register("second", needs=("arms", "labels"))(mine)
    registry.register("first")(mine)
    assert list(registry) == ["first", "second", "mine"]
    assert registry.needing("arms") == ["second", "mine"]
    assert registry.needing("labels") == ["second"]
    assert "absent" not in registry


def test_a_forgotten_file_needs_nothing():
    registry: Registry[int] = Registry("numbers")
    registry.register("mine", needs=("arms",))(mine)
    registry.forget(file_of(mine))
    assert registry.needing("arms") == []
    registry.register("mine")(mine)
    assert registry.needing("arms") == []
