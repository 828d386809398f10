"""Strict reading of a config.json, and the kind of each of its layers.

An error names the first key that is missing or has an unsupported value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spanlab.registry import among

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
#: Keys that have the text model of a file that also has other ones.
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
LONGEST = 60  # characters of a value in an error
#: Types of the values of keys that a file may lack or leave null, and the words for them.
OPTIONAL: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(
        (
            *(
                "num_nextn_predict_layers",
                "num_kv_shared_layers",
                "hidden_size_per_layer_input",
                "moe_latent_size",
            ),
            *(
                "first_k_dense_replace",
                "num_dense_layers",
                "moe_layer_start_index",
                "moe_layer_end_index",
            ),
            *("index_topk_freq", "index_skip_topk_offset", "mamba_d_ssm"),
        ),
        ((int,), "a whole number"),
    ),
    **dict.fromkeys(
        (
            *(
                "mlp_only_layers",
                "moe_layers",
                "no_rope_layers",
                "attn_layer_indices",
                "full_attn_idxs",
            ),
            *("compress_ratios", "mtp_layer_types"),
        ),
        ((list,), "a list"),
    ),
    **dict.fromkeys(
        (
            *(
                "linear_attn_config",
                "sparse_attention_config",
                "attention_other_setting",
                "per_layer_config",
            ),
            "quantization_config",
        ),
        ((dict,), "keys with values"),
    ),
    **dict.fromkeys(
        (
            *("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "use_sliding_window"),
            *(
                "use_shared_attention_adapter",
                "block_auto_adjust_ff_dim",
                "use_head_wise_attn_gate",
            ),
        ),
        ((bool,), "true or false"),
    ),
    **dict.fromkeys(
        ("model_type", "moe_layers_enum", "hybrid_override_pattern"), ((str,), "a string")
    ),
    "block_ffn_dim_multiplier": ((int, float), "a number"),
}
#: Keys that a config.json of a multimodal model may have at the top level instead of in
#: `text_config`.
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of the text model of a config.json.

    `source`  the setting and its value that selected the file: the prefix of error messages
    `name`    name of the model
    `keys`    keys of the text model
    `within`  the key whose value these keys are, and a point; "" at the top
    """

    source: str
    name: str
    keys: Mapping[str, Any]
    within: str = ""

    @staticmethod
    def of(source: str, name: str, content: object) -> ModelConfig:
        """The text model of the content of a file: that of its `text_config`, if it has one."""
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected the keys of a config.json")
        config = ModelConfig(source, name, content)
        while nested := next((key for key in NESTED if key in config.keys), None):
            text = config.keys[nested]
            if not isinstance(text, dict):
                raise config.error(nested, "the keys of the text model")
            top_level = {
                key: config.keys[key]
                for key in ("model_type", *_SHARED)
                if config.keys.get(key) is not None
            }
            for key in _SHARED:
                if key in top_level and text.get(key, top_level[key]) != top_level[key]:
                    raise config.error(key, f"{_shown(text[key])}, as in {nested}")
            config = ModelConfig(source, name, top_level | text)
        for key, (types, words) in OPTIONAL.items():
            value = config.keys.get(key)
            if value is not None and (
                not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
            ):
                raise config.error(key, words)
        return config

    def inner(self, key: str) -> ModelConfig:
        """The keys in the value of a key; none if it is missing or null."""
        return ModelConfig(self.source, self.name, self.keys.get(key) or {}, f"{self.within}{key}.")

    def error(self, key: str, expected: str) -> ValueError:
        """The error for a key that is missing, or for an unsupported value."""
        if key in self.keys:
            return ValueError(
                f"{self.source}: {self.within}{key}={_shown(self.keys[key])}: expected {expected}"
            )
        return ValueError(f"{self.source}: {self.within}{key} is missing: expected {expected}")

    def get(self, key: str) -> Any:
        """The value of a key, or None if the file does not have the key."""
        return self.keys.get(key)

    def integer(self, key: str, least: int = 1) -> int:
        """The value of a required key, a whole number of at least `least`."""
        value = self.keys.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(key, f"a whole number from {least} on")
        return value

    def any_integer(self, *keys: str) -> int:
        """The value of the first of these names of a required key that the file has."""
        given = [key for key in keys if self.keys.get(key) is not None] or [
            key for key in keys if key in self.keys
        ]
        return self.integer(given[0] if given else " or ".join(keys))

    def listed(self, key: str, length: int, kinds: Mapping[Any, str]) -> list[str] | None:
        """The values of a list, one per layer, by the names in `kinds`; None if the key is missing
        or null.

        A list may go on with the layers of multi-token prediction, which are left out.
        """
        values = self.keys.get(key)
        if values is None:
            return None
        predicting = self.keys.get("num_nextn_predict_layers") or 0
        if not isinstance(values, list) or len(values) not in (length, length + predicting):
            count = f" of {len(values)}" if isinstance(values, list) else f"={_shown(values)}"
            raise ValueError(
                f"{self.source}: {key}{count}: expected a list of num_hidden_layers={length} values"
            )
        for value in values[:length]:
            if not isinstance(value, (str, int)) or value not in kinds:
                expected = " or ".join(str(kind) for kind in kinds)
                raise ValueError(f"{self.source}: {_shown(value)} in {key}: expected {expected}")
        return [kinds[value] for value in values[:length]]

    def integer_or(self, key: str, default: int) -> int:
        """A whole number of at least 1; `default` if the key is missing or null."""
        return default if self.keys.get(key) is None else self.integer(key)

    def itemsize(self) -> int:
        """Bytes of a number of the model's type."""
        key = "torch_dtype" if self.keys.get("dtype") is None else "dtype"
        name = self.keys.get(key)
        if not isinstance(name, str) or name not in ITEMSIZES:
            raise self.error(key, among(_shown(name), ITEMSIZES))
        return ITEMSIZES[name]

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


def _shown(value: object) -> str:
    """A value in an error, cut where it is long; a number in quotes keeps them."""
    text = repr(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# ------------------------------------------------------------------------------
# Kinds of layers, and which layer is of which kind where a config.json has no `layer_types`.
# ------------------------------------------------------------------------------

FULL, RECURRENT, WINDOW, CHUNK, INDEXED = "full", "recurrent", "window", "chunk", "indexed"
COMPRESSED, HEAVY = "compressed", "heavily compressed"
BOTH = "full beside recurrent"  # in one layer
MLP, MOE = "dense alone", "experts alone"  # layers without a mixer
#: Kinds of layers by the names that transformers gives them in `layer_types`.
KINDS = {
    "full_attention": FULL,
    "linear_attention": RECURRENT,
    "sliding_attention": WINDOW,
    "chunked_attention": CHUNK,
    "indexed_attention": INDEXED,
    "minimax_m3_sparse": INDEXED,
    "compressed_sparse_attention": COMPRESSED,
    "heavily_compressed_attention": HEAVY,
    "attention": FULL,  # of Granite 4, beside mamba
    "mamba": RECURRENT,
    "conv": RECURRENT,
    "hybrid": BOTH,
    "mlp": MLP,
    "moe": MOE,
}
Pattern = Callable[[ModelConfig, int], list[str]]


def every_nth(default: int, *keys: str, others: str = WINDOW) -> Pattern:
    """Every n-th layer is full; n is the value of the first of `keys` in the file."""

    def kinds(config: ModelConfig, layers: int) -> list[str]:
        letters = next((config.get(key) for key in keys if isinstance(config.get(key), str)), "")
        if letters and {*letters} <= {"L", "G"}:  # EXAONE 4: local and global
            return [
                FULL if letters[layer % len(letters)] == "G" else others for layer in range(layers)
            ]
        step = next((config.integer(key) for key in keys if config.get(key) is not None), default)
        return [FULL if (layer + 1) % step == 0 else others for layer in range(layers)]

    return kinds


def all_full(config: ModelConfig, layers: int) -> list[str]:
    return [FULL] * layers


def all_indexed(config: ModelConfig, layers: int) -> list[str]:
    return [INDEXED] * layers


def windows(config: ModelConfig, layers: int) -> list[str]:
    """All layers have the window that the file sets, unless it is as long as the context."""
    if "sliding_window" not in config.keys and config.get("model_type") in ("mistral", "ministral"):
        raise config.error(
            "sliding_window", "a number or null; transformers takes 4096 for a missing one"
        )
    window, positions = config.get("sliding_window"), config.get("max_position_embeddings")
    covered = window is None or (
        positions is not None and config.integer("sliding_window") >= positions
    )
    return [FULL if covered else WINDOW] * layers


def late_windows(config: ModelConfig, layers: int) -> list[str]:
    """Layers from `max_window_layers` on have a window, where the file uses it."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return [FULL] * layers
    kinds = windows(config, layers)
    first = config.integer("max_window_layers", least=0)
    return [FULL] * min(first, layers) + kinds[first:]


def recurrent_but_every(config: ModelConfig, layers: int) -> list[str]:
    step = config.integer("full_attention_interval")
    return [FULL if (layer + 1) % step == 0 else RECURRENT for layer in range(layers)]


def only_listed(config: ModelConfig, layers: int) -> list[str]:
    raise config.error("layer_types", "a list of one kind per layer")


def numbered(key: str) -> Pattern:
    """The layers that a list numbers from 0 are full, others recurrent."""

    def kinds(config: ModelConfig, layers: int) -> list[str]:
        listed = config.get(key)
        if not isinstance(listed, list):
            raise config.error(key, "a list of layers")
        return [FULL if layer in listed else RECURRENT for layer in range(layers)]

    return kinds


def periodic(config: ModelConfig, layers: int) -> list[str]:
    """One layer of each period is full, others recurrent (Jamba)."""
    period = config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset", least=0)
    return [FULL if layer % period == offset else RECURRENT for layer in range(layers)]


def both_in_one(config: ModelConfig, layers: int) -> list[str]:
    return [BOTH] * layers


#: Kinds of layers by the letters of `hybrid_override_pattern`.
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": MOE}


def lettered(config: ModelConfig, layers: int) -> list[str]:
    """The layers by the letters of a pattern (Nemotron-H)."""
    config.check_value("sliding_window", [None], "null, for windows beside states are not modelled")
    letters = config.get("hybrid_override_pattern")
    if not isinstance(letters, str) or not letters or not {*letters} <= LETTERS.keys():
        raise config.error(
            "hybrid_override_pattern", f"a string of {', '.join(LETTERS)}, or layers_block_type"
        )
    return [LETTERS[letter] for letter in letters]


def marked_windows(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `hybrid_layer_pattern` marks have a window (MiMo-V2-Flash)."""
    listed = config.listed("hybrid_layer_pattern", layers, {0: FULL, 1: WINDOW})
    if listed is None:
        raise config.error("hybrid_layer_pattern", "a list of 0 and 1, or layer_types")
    return listed


def behind_dense(config: ModelConfig, layers: int) -> list[str]:
    """Every `sliding_window_pattern`-th layer is full, counted from 1 again behind the dense ones
    (Cohere2-MoE)."""
    dense = config.get("first_k_dense_replace") or 0
    step = config.integer_or("sliding_window_pattern", 4)
    first = config.integer_or("prefix_dense_sliding_window_pattern", 1)
    kinds = [FULL if (layer + 1) % first == 0 else WINDOW for layer in range(dense)]
    return kinds + [FULL if (layer + 1) % step == 0 else WINDOW for layer in range(layers - dense)]


def kimi(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `linear_attn_config` numbers from 1."""
    listed = config.get("linear_attn_config")
    if not isinstance(listed, dict) or "full_attn_layers" not in listed:
        raise config.error("layer_types", "a list, or linear_attn_config with full_attn_layers")
    return [
        FULL if layer + 1 in listed["full_attn_layers"] else RECURRENT for layer in range(layers)
    ]


def chunks(config: ModelConfig, layers: int) -> list[str]:
    """Layers with positions read chunks; every `no_rope_layer_interval`-th, without, reads all."""
    listed = config.get("no_rope_layers")
    if listed:
        return [CHUNK if rotated else FULL for rotated in listed]
    return every_nth(config.integer_or("no_rope_layer_interval", 4), others=CHUNK)(config, layers)


_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def compressed(config: ModelConfig, layers: int) -> list[str]:
    """The layers by the tokens of an entry that `compress_ratios` lists, also of layers that
    draft."""
    config.check_value("compress_rates", [None, _RATES], f"{_RATES}, as in vLLM")
    listed, kinds = config.get("compress_ratios"), {0: WINDOW, 1: WINDOW, 4: COMPRESSED, 128: HEAVY}
    if (
        not isinstance(listed, list)
        or len(listed) < layers
        or any(tokens not in kinds for tokens in listed)
    ):
        raise config.error(
            "compress_ratios", f"a list of 0, 1, 4 and 128, for num_hidden_layers={layers} or more"
        )
    return [kinds[tokens] for tokens in listed[:layers]]


def sparse(config: ModelConfig, layers: int) -> list[str]:
    """The layers that `sparse_attention_config` marks choose the tokens that they read."""
    listed = config.get("sparse_attention_config")
    marked = listed.get("sparse_attention_freq") if isinstance(listed, dict) else None
    return [INDEXED if mark else FULL for mark in marked] if marked else [FULL] * layers
