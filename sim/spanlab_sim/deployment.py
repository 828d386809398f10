"""The devices of an engine, and its number formats of weights and KV."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil

from spanlab.checks import one_of, positive
from spanlab.model_spec import ModelSpec

#: Bytes of a weight over those of the model's own format, and how much faster tensor cores multiply it. int4: scales of
#: two bytes for each 128 weights, which are unpacked before they are multiplied.
WEIGHTS = {"model": (1.0, 1.0), "fp8": (0.5, 2.0), "int4": (0.25 + 1 / 128, 1.0)}
#: Bytes of a number of KV over those of the model's own format; int4 with scales of two bytes for each 128.
KV = {"model": 1.0, "fp8": 0.5, "int4": 0.25 + 1 / 128}
#: Numbers of tokens for which vLLM captures CUDA graphs; a step of fewer tokens is padded to the next one.
CAPTURED: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))


@dataclass
class Deployment:
    """An engine on `tensor_parallel` · `data_parallel` devices.

    `tensor_parallel`  devices that share each layer; two all-reduces per layer
    `data_parallel`    ranks with requests of their own that share the experts, and so take every step together
    `weights`          model (as its config.json says), fp8 or int4
    `kv`               model, fp8 or int4
    `cuda_graphs`      steps are padded to the numbers of tokens for which graphs were captured
    """

    tensor_parallel: int = 1
    data_parallel: int = 1
    weights: str = "model"
    kv: str = "model"
    cuda_graphs: bool = True

    def check(self, path: str, model: ModelSpec) -> None:
        """Raise ValueError for devices or formats that the model does not support."""
        positive(f"{path}.tensor_parallel", self.tensor_parallel)
        positive(f"{path}.data_parallel", self.data_parallel)
        one_of(f"{path}.weights", self.weights, WEIGHTS)
        one_of(f"{path}.kv", self.kv, KV)
        if model.attention_heads % self.tensor_parallel:
            raise ValueError(
                f"{path}.tensor_parallel={self.tensor_parallel}: expected a divisor of the {model.attention_heads} "
                f"attention heads of {model.name}"
            )
        if self.data_parallel > 1 and not model.expert_layers:
            raise ValueError(
                f"{path}.data_parallel={self.data_parallel} with model.name={model.name}: expected 1, for ranks of a "
                "dense model share nothing: they are replicas"
            )
        for key, value, itemsize in (
            ("weights", self.weights, model.weight_itemsize),
            ("kv", self.kv, model.kv_itemsize),
        ):
            if value != "model" and itemsize != 2:
                raise ValueError(
                    f"{path}.{key}={value} with model.{key[:6].rstrip('s')}_itemsize={itemsize}: expected 2"
                )

    @property
    def devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel * self.data_parallel

    def weight_bytes(self, model: ModelSpec) -> int:
        """Return the bytes of weights on one device; the embedding table stays in the model's format."""
        scale = WEIGHTS[self.weights][0]
        experts = model.expert_parameters * model.weight_itemsize * scale / self.devices
        dense = (model.layer_parameters - model.expert_parameters) * model.weight_itemsize * scale
        tables = (model.head_parameters + model.embedding_parameters) * model.weight_itemsize
        return int(experts + (dense + tables) / self.tensor_parallel)

    def kv_bytes_per_token(self, model: ModelSpec) -> float:
        """Return the bytes of KV per token on one device; KV heads are copied where devices outnumber them."""
        return model.kv_bytes_per_token * KV[self.kv] / min(self.tensor_parallel, model.kv_heads)

    def block_tokens(self, model: ModelSpec, usual: int) -> int:
        """Return the tokens of a block: `usual`, or in hybrids a multiple, since a block holds KV or states.

        A layer's KV is then no smaller than a layer's state, as vLLM sizes blocks.
        """
        if not model.is_hybrid:
            return usual
        kv = self.kv_bytes_per_token(model) / model.attention_layers
        state = model.state_bytes / model.recurrent_layers / self.tensor_parallel
        return ceil(state / (kv * usual)) * usual

    def padded(self, tokens: int) -> int:
        """Return the tokens that a forward of `tokens` tokens computes."""
        if not self.cuda_graphs or tokens > CAPTURED[-1]:
            return tokens
        return CAPTURED[bisect_left(CAPTURED, tokens)]
