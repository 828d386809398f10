"""Loading of models: random weights, or weights from the hub, a folder or a package."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import cache
from heapq import nlargest
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from spanlab.core.admission import BatchRules
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.tree import CacheSpan, Node, PrefixTree
from spanlab.engine.hook import (
    ATTENTION,
    decoder_layers,
    hook_rows,
    no_weight_bars,
    register,
    store_by_input,
)
from spanlab.engine.model import SpanModel, spec_of
from spanlab.engine.oracle import check_model
from spanlab.engine.recurrent import MIXER, pack_mixers
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.model_files import find_config, packaged, packaged_folder
from spanlab.model_spec import GIB, DeviceRates, ModelSpec

# ------------------------------------------------------------------------------
# The support check: which layers of a model allow exact reuse of spans, and the reasons for the
# others.
#
# The stored keys of a span must equal those that the model would compute at another position,
# up to one rotation per position. So every layer must attend to all earlier tokens with a plain
# softmax of scaled products, and rotate queries and keys by angles that depend on the position
# alone. Models that are not known to do so are rejected.
# ------------------------------------------------------------------------------

EXACT_ROPES = ("default", "linear", "llama3", "yarn")
_MOVING_ROPES = {"dynamic": "dynamic NTK", "longrope": "LongRoPE"}
_WINDOWED = "sliding_attention"
FULL, RECURRENT = "full_attention", "linear_attention"
_RECURRENT = ("conv", "hybrid", "hybrid_sliding", "mamba")
_DELTA_NET = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)


@dataclass(frozen=True)
class Verdict:
    """Result of the support check for one layer; a non-empty `reason` completes a sentence after
    'it'."""

    layer: int
    reason: str = ""

    @property
    def exact(self) -> bool:
        """Whether spans can be reused exactly in this layer."""
        return not self.reason


def check_support(config: PreTrainedConfig) -> tuple[Verdict, ...]:
    """Check all layers of the causal LM that `config` describes, without allocating weights."""
    layers = range(getattr(config, "num_hidden_layers", None) or 1)
    model_reason = _model_class(config)
    verdicts = tuple(
        Verdict(layer, _kind(config, layer) or model_reason or _rope(config)) for layer in layers
    )
    if not all(verdict.exact for verdict in verdicts):
        return verdicts
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model_reason = _structure(model)
    return tuple(Verdict(layer, model_reason or _layer(model, layer)) for layer in layers)


def require_exact(name: str, verdicts: Sequence[Verdict]) -> None:
    """Raise a ValueError with the first reason and its layers, unless all layers are exact."""
    reasons = [verdict.reason for verdict in verdicts if not verdict.exact]
    if not reasons:
        return
    layers = [verdict.layer for verdict in verdicts if verdict.reason == reasons[0]]
    location = (
        "every layer" if len(layers) == len(verdicts) else f"layer {', '.join(map(str, layers))}"
    )
    raise ValueError(
        f"model.name is {name!r}, expected a model that spans can be reused in: in {location} it {reasons[0]}."
    )


def _model_class(config: PreTrainedConfig) -> str:
    """Reason against the model class, or an empty string."""
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        return (
            f"is of type {config.model_type!r}, which is no causal language model of transformers"
        )
    # those are compatible but do not declare it
    if not (model_class.is_backend_compatible() or _is_delta_net(config)):
        return f"is of type {config.model_type!r}, whose attention does not go through transformers' interface"
    if "logits_to_keep" not in signature(model_class.forward).parameters:
        return f"is of type {config.model_type!r}, which computes the logits of all rows or none"
    if not getattr(config, "is_causal", True) or getattr(
        config, "use_bidirectional_attention", False
    ):
        return "attends to later tokens too"
    return ""


def _kind(config: PreTrainedConfig, layer: int) -> str:
    """Reason against a layer's type, or an empty string."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    kind = kinds[layer] if kinds else _WINDOWED if window else FULL
    if kind == RECURRENT:
        return (
            ""
            if _is_delta_net(config)
            else "is recurrent, but no GatedDeltaNet whose sizes its config names"
        )
    if kind in _RECURRENT:
        return f"is recurrent ({kind}) in a way whose state is not one of GatedDeltaNet"
    if kind == _WINDOWED:
        covered = window is None or window >= config.max_position_embeddings
        return "" if covered else f"attends to a sliding window of {window} tokens only"
    return "" if kind == FULL else f"uses attention of the kind {kind!r}"


def _is_delta_net(config: PreTrainedConfig) -> bool:
    return all(hasattr(config, size) for size in _DELTA_NET)


def _rope(config: PreTrainedConfig) -> str:
    """Reason against the rotary embedding's settings, or an empty string."""
    rope: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if not rope:
        return "has no rotary position embedding"
    if "rope_type" not in rope:
        return "has a rotary embedding that differs from layer to layer"
    kind = rope["rope_type"]
    if kind in _MOVING_ROPES:
        return f"uses {_MOVING_ROPES[kind]} rotary embedding, whose angles depend on the length of the prompt"
    if kind not in EXACT_ROPES:
        return f"uses the rotary embedding {kind!r}, which is not one of {', '.join(EXACT_ROPES)}"
    return ""


def _structure(model: PreTrainedModel) -> str:
    """Reason against the modules of the whole model, or an empty string."""
    config, base = model.config, model.base_model
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != config.num_hidden_layers:
        return "does not keep its decoder layers in a plain list"
    rotary = getattr(base, "rotary_emb", None)
    if not (hasattr(rotary, "inv_freq") and hasattr(rotary, "attention_scaling")):
        return "has no common rotary module with its frequencies"
    queries, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if keys and queries % keys:
        return f"has {queries} query heads, which is no multiple of its {keys} key heads"
    return ""


def _layer(model: PreTrainedModel, layer: int) -> str:
    """Reason against a layer's settings and modules, or an empty string."""
    config: PreTrainedConfig = model.config
    # 1 for layers that do rotate, despite the name
    rotated = getattr(config, "no_rope_layers", None)
    if rotated and not rotated[layer]:
        return "does not rotate, unlike other layers"
    if getattr(config, "kv_lora_rank", None):
        return "keeps latent keys and values (MLA)"
    module = decoder_layers(model)[layer]
    if hasattr(module, MIXER):
        parameters = signature(getattr(module, MIXER).forward).parameters
        return (
            ""
            if "cache_params" in parameters
            else "keeps its recurrent state in a way that is not transformers' own"
        )
    attention: Any = getattr(module, "self_attn", None)
    if not isinstance(getattr(attention, "scaling", None), float):
        return "has no attention module with a fixed softmax scale"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention scores softly"
    if any("sink" in name for name, _ in attention.named_parameters()):
        return "has attention sinks"
    return ""


def load_model(settings: EngineSettings, spec: ModelSpec) -> SpanModel:
    """Load the model of the settings, with support check and numeric self-check.

    ValueError for a model that cannot be loaded, differs from the sizes in `spec` or does not allow
    reuse of spans, and for a missing device.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    name, device = settings.name or spec.name, resolve_device(settings.device)
    config, dtype = read_config(settings, name), getattr(torch, dtype_of(spec))
    require_exact(name, check_support(config))
    # policies and timing models use the sizes in `spec`
    sizes = asdict(replace(spec_of(spec.name, config, dtype), name=spec.name))
    for key, value in asdict(spec).items():
        if sizes[key] != value:
            raise ValueError(
                f"model.{key}={value}: {settings.path or name} has {sizes[key]}; "
                "expected the sizes of the model that the engine runs"
            )
    if settings.weights == "random":
        return random_model(name, config, dtype=dtype, device=device, seed=settings.seed)
    model = load_pretrained(settings, name, config, dtype)
    return wrap(name, model.to(device))  # type: ignore[arg-type]  # transformers' wrapper of `to` loses `self`


def random_model(
    name: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> SpanModel:
    """A checked model with random weights for a config; torch's random generators are unchanged."""
    require_exact(name, check_support(config))
    register()
    device = torch.device(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with device:  # of the weights alone: the checks compare numbers on the host
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return wrap(name, model)


def wrap(name: str, model: PreTrainedModel) -> SpanModel:
    """Hook a transformers model that passed the support check; ValueError if the numeric self-check
    fails."""
    register()
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    hook_rows(model)
    pack_mixers(model)
    store_by_input(model)
    return check_model(name, model)


def read_config(settings: EngineSettings, name: str) -> PreTrainedConfig:
    """The transformers config of a model; ValueError if it cannot be loaded."""
    try:
        if settings.weights != "random":
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                _source(settings, name)
            ).get_text_config(decoder=True)
            return config
        return named_config(name)
    except (OSError, KeyError, StrictDataclassError) as error:
        raise _load_error(settings, name, error) from error


def named_config(name: str) -> PreTrainedConfig:
    """The transformers config for a choice of conf/model, a file, a folder, or a repository's
    config.json."""
    keys = dict(find_config(name, "engine.name").keys)
    kind = keys.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"engine.name={name}: its model_type is {kind}; expected one of transformers"
        )
    return AutoConfig.for_model(kind, **keys).get_text_config(decoder=True)


def _source(settings: EngineSettings, name: str) -> str:
    """The argument of `from_pretrained`: an existing folder, or the name of a repository."""
    if settings.weights == "package":
        return str(packaged_folder(packaged(name, "engine.name")))
    if settings.path is None:
        return name
    if not (Path(settings.path) / "config.json").is_file():
        raise ValueError(
            f"engine.path={settings.path}: expected a folder with a config.json and weights"
        )
    return settings.path


def load_pretrained(
    settings: EngineSettings, name: str, config: PreTrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Load stored weights; ValueError if any are missing, because transformers would initialise
    them randomly."""
    register()
    source = _source(settings, name)
    try:
        with no_weight_bars():
            loaded: Any = (
                AutoModelForCausalLM.from_pretrained(  # returns a pair, unlike its declared type
                    source, config=config, dtype=dtype, output_loading_info=True
                )
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise _load_error(settings, name, error) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise ValueError(
            f"{_setting(settings, name)}: expected all weights of the model; {len(missing)} are missing, "
            f"first {missing[0]}"
        )
    return model


def _setting(settings: EngineSettings, name: str) -> str:
    return f"engine.path={settings.path}" if settings.path else f"engine.name={name}"


def _load_error(settings: EngineSettings, name: str, error: BaseException) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".")
    return ValueError(
        f"{_setting(settings, name)} with engine.weights={settings.weights}: expected a model to load: {reason}"
    )


def resolve_device(name: str) -> torch.device:
    """Resolve a device name; `auto` is the first GPU, or else the CPU; ValueError for a missing
    device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"engine.device is {name!r}, expected cpu, cuda or cuda:<number>."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"engine.device is {name!r}, expected cpu, cuda or cuda:<number>.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"engine.device is {name!r}, expected one of this machine's {torch.cuda.device_count()} CUDA devices."
        )
    return device


# ------------------------------------------------------------------------------
# Conversion of a GGUF file to a Hugging Face folder: config.json, float16 weights, tokenizer.
# ------------------------------------------------------------------------------

_DROPPED_KEYS = (
    "quantization_config",
    "_name_or_path",
    "_model_name_or_path",
    "dtype",
    "architectures",
)


def convert(file: Path, folder: Path) -> None:
    """Write model and tokenizer of `file` to `folder`, with dequantised weights."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with redirect_stderr(io.StringIO()):  # hides progress bars per tensor; errors raise exceptions
        tokenizer = AutoTokenizer.from_pretrained(**source)
        # required by the GGUF loader
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # transformers cannot save a model with a quantisation config: copy the weights to one
        # without
        keys = {
            key: value for key, value in model.config.to_dict().items() if key not in _DROPPED_KEYS
        }
        with torch.device("meta"):  # skips random initialisation
            plain = type(model)(type(model.config)(**keys, dtype="float16"))
        plain.load_state_dict(
            {name: tensor.half() for name, tensor in model.state_dict().items()}, assign=True
        )
        plain.tie_weights()
        plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ------------------------------------------------------------------------------
# Pool size of a run, and checks that every request fits.
# ------------------------------------------------------------------------------


def pool_pages(
    policy: TreePolicy, rules: BatchRules, requests: Sequence[Request], context: int
) -> int:
    """Pages that suffice for every allocation of the policy's store, for any order of arrivals.

    Sum of three terms: the budget and, for each running request, the last page of its prompt, which
    it may compute beside the stored one, or all storable tokens plus the largest requests that run
    at once if that is less; up to page - 1 tokens for every page sequence of running requests; the
    tokens by which their longest options exceed their answers. ValueError for a request that alone
    exceeds the budget, or `context`, the model's context length.
    """
    needs, store = [policy.need(request) for request in requests], policy.store
    limits = {"kv_gib": store.budget.kv_bytes, "total_gib": store.budget.total_bytes}
    for request, need in zip(requests, needs, strict=True):
        tokens = request.num_tokens + request.longest_output - 1
        if tokens > context:
            raise ValueError(
                f"request {request.id} has {tokens:,} tokens, its answer included: "
                f"expected at most {context:,}, the positions that the model was made for"
            )
        size = need.tokens * store.token_bytes
        for key, limit in limits.items():
            if limit < UNLIMITED and size > limit:
                raise ValueError(
                    f"store.{key}={limit / GIB:.3g}: expected at least {size / GIB:.3g}, for request {request.id} "
                    f"alone may need {need.tokens:,} tokens of KV, {need.copies:,} of them in copies of its own"
                )
    page, running_requests = store.tree.block_size, rules.max_num_seqs
    running = sum(nlargest(running_requests, (need.tokens for need in needs)))
    page_sequences = sum(nlargest(running_requests, (need.sequences for need in needs)))
    stored = stored_tokens(policy, requests) if policy.rules.keeps else 0
    options = sum(
        nlargest(
            running_requests, (request.longest_output - request.output_len for request in requests)
        )
    )
    twice = page * min(running_requests, len(requests)) if policy.rules.keeps else 0
    budget_tokens = min(limits.values()) // store.token_bytes
    used = min(budget_tokens + twice, running + stored)
    return (used + options + page_sequences * (page - 1)) // page


def stored_tokens(policy: TreePolicy, requests: Sequence[Request]) -> int:
    """Tokens stored after a run without evictions, in full pages; equal cache spans of equal
    parents count once.

    Answers, and tokens stored beside spans, count for every request, because which requests share
    them is unknown before the run.
    """
    page = policy.store.tree.block_size
    tree, answers = PrefixTree(page), 0
    roots: dict[object, Node] = {}
    for request in requests:
        cache_spans = policy.layout(request)
        answers += policy.extra_stored_tokens(request)
        last = cache_spans[-1]
        # an answer extends the full pages of the last cache span, without its last, uncomputed
        # token
        answered = last.stop - last.start + request.output_len - 1
        answers += answered // page * page - _full_page_tokens(last, page)
        for cache_span in cache_spans:
            if cache_span.storable:
                root = roots.setdefault(policy.index.key(request, cache_span), tree.new_root())
                tree.extend(root, cache_span.tokens, _full_page_tokens(cache_span, page), 0)
    return tree.num_tokens + answers


def _full_page_tokens(cache_span: CacheSpan, page: int) -> int:
    return (cache_span.stop - cache_span.start) // page * page


# ------------------------------------------------------------------------------
# Measurement of a device's peak rates by large matrix products and a large copy.
# ------------------------------------------------------------------------------

# rows of square matrices; the highest rate counts
_PRODUCT = {"cpu": (512, 1024, 2048), "cuda": (8192,)}
_COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes, far larger than any cache
_ROUNDS = 3

Clock = Callable[[], float]


@cache
def measure(
    dtype: torch.dtype, device: torch.device, clock: Clock = time.perf_counter
) -> DeviceRates:
    """Measure FLOP and memory rates as the best of several rounds, once per process; `clock`
    returns seconds.

    The best round is used because a rate is an upper limit: other load on the machine must not
    lower it.
    """
    flops = max(_product_rate(size, dtype, device, clock) for size in _PRODUCT[device.type])
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return DeviceRates(
        flops, 2 * len(source) / _fastest(lambda: target.copy_(source), device, clock)
    )


def _product_rate(size: int, dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    # random numbers: a GPU multiplies zeros and ones faster, at less power, than the numbers of a
    # model
    drawn = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, generator=drawn, device=device).to(dtype) for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * size**3 / _fastest(lambda: torch.mm(left, right, out=out), device, clock)


def _fastest(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        _wait(device)
        began = clock()
        call()
        _wait(device)
        rounds.append(clock() - began)
    return min(rounds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
