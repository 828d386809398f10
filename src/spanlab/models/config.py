"""The keys of a config.json, read strictly: one that is missing or has no meaning here is named in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Keys that a file of text and vision may state beside `text_config` instead of in it.
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """The text model of a config.json.

    `source`  the setting and its value that the file was found by, as error messages begin
    `name`    the model's name
    `keys`    what the file says of the text model
    """

    source: str
    name: str
    keys: Mapping[str, Any]

    @staticmethod
    def of(source: str, name: str, content: object) -> ModelConfig:
        """The text model of a file's content: of its `text_config` where it has one."""
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected the keys of a config.json")
        whole = ModelConfig(source, name, content)
        whole.refuse_unless("quantization_config", [None], "none, for sizes of quantised weights are not derived")
        return ModelConfig(source, name, whole._text_keys())

    def _text_keys(self) -> dict[str, Any]:
        if "text_config" not in self.keys:
            return dict(self.keys)
        text = self.keys["text_config"]
        if not isinstance(text, dict):
            raise self.mistake("text_config", "the keys of the text model")
        above = {key: self.keys[key] for key in ("model_type", *_SHARED) if self.keys.get(key) is not None}
        for key in _SHARED:
            if key in above and text.get(key, above[key]) != above[key]:
                raise self.mistake(key, f"{text[key]}, as in text_config")
        return above | text

    def mistake(self, key: str, expected: str) -> ValueError:
        """The error of a key that is missing, or of a value without a meaning here."""
        if key in self.keys:
            return ValueError(f"{self.source}: {key}={self.keys[key]}: expected {expected}")
        return ValueError(f"{self.source}: {key} is missing: expected {expected}")

    def get(self, key: str) -> Any:
        """A value, or None where the file has none."""
        return self.keys.get(key)

    def integer(self, key: str, least: int = 1) -> int:
        """A whole number from `least` on, which must be there."""
        value = self.keys.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.mistake(key, f"a whole number from {least} on")
        return value

    def integer_or(self, key: str, other: int) -> int:
        """A whole number from 1 on; `other` where the file has none."""
        return other if self.keys.get(key) is None else self.integer(key)

    def flag(self, key: str) -> bool:
        """True or false, which must be there."""
        value = self.keys.get(key)
        if not isinstance(value, bool):
            raise self.mistake(key, "true or false")
        return value

    def refuse_unless(self, key: str, allowed: list[object], expected: str) -> None:
        """Refuse a value that is not among the allowed ones; None stands for a missing key."""
        if self.keys.get(key) not in allowed:
            raise self.mistake(key, expected)
