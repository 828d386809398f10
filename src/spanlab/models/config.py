"""Strict reading of a config.json: an error names the first key that is missing or has an unsupported value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Keys that a config.json of a multimodal model may have at the top level instead of in `text_config`.
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of the text model of a config.json.

    `source`  the setting and its value that selected the file: the prefix of error messages
    `name`    name of the model
    `keys`    keys of the text model
    """

    source: str
    name: str
    keys: Mapping[str, Any]

    @staticmethod
    def of(source: str, name: str, content: object) -> ModelConfig:
        """The text model of the content of a file: its `text_config` if it has one."""
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected the keys of a config.json")
        config = ModelConfig(source, name, content)
        config.check_value("quantization_config", [None], "none, for sizes of quantised weights are not derived")
        return ModelConfig(source, name, config._text_keys())

    def _text_keys(self) -> dict[str, Any]:
        if "text_config" not in self.keys:
            return dict(self.keys)
        text = self.keys["text_config"]
        if not isinstance(text, dict):
            raise self.error("text_config", "the keys of the text model")
        top_level = {key: self.keys[key] for key in ("model_type", *_SHARED) if self.keys.get(key) is not None}
        for key in _SHARED:
            if key in top_level and text.get(key, top_level[key]) != top_level[key]:
                raise self.error(key, f"{text[key]}, as in text_config")
        return top_level | text

    def error(self, key: str, expected: str) -> ValueError:
        """The error for a key that is missing, or for an unsupported value."""
        if key in self.keys:
            return ValueError(f"{self.source}: {key}={self.keys[key]}: expected {expected}")
        return ValueError(f"{self.source}: {key} is missing: expected {expected}")

    def get(self, key: str) -> Any:
        """The value of a key, or None if the file does not have the key."""
        return self.keys.get(key)

    def integer(self, key: str, least: int = 1) -> int:
        """The value of a required key, a whole number of at least `least`."""
        value = self.keys.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number from {least} on")
        return value

    def integer_or(self, key: str, default: int) -> int:
        """A whole number of at least 1; `default` if the key is missing or null."""
        return default if self.keys.get(key) is None else self.integer(key)

    def flag(self, key: str) -> bool:
        """The value of a required key, true or false."""
        value = self.keys.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def check_value(self, key: str, allowed: list[object], expected: str) -> None:
        """Raise ValueError for a value that is not in `allowed`; None represents a missing key."""
        if self.keys.get(key) not in allowed:
            raise self.error(key, expected)
