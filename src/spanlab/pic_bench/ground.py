"""What all arms of one model share: the model, its tokenizer, and what can be asked in its words."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from spanlab.bench import rates
from spanlab.bench.bed import Bed
from spanlab.bench.machine import device_of
from spanlab.engine.load import ModelChoice, load_model, read_config
from spanlab.pic_bench.texts import Texts, fresh_words, one_token_words
from spanlab.queries import ChatTokenizer, builtin_tokenizer, load_tokenizer
from spanlab.settings.pic_bench import PicBench

_TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]


@dataclass(eq=False)
class Ground(Bed):
    """A bed with a tokenizer, and texts made for it."""

    tokenizer: ChatTokenizer
    texts: Texts


def tokenizer_of(settings: PicBench, name: str) -> ChatTokenizer:
    """A model's tokenizer; ValueError where it cannot be had or has no chat template."""
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(Path(settings.tokenizer))
    elif _is_ours(settings):
        tokenizer = builtin_tokenizer()
    else:
        tokenizer = load_tokenizer(Path(settings.engine.path) if settings.engine.path else _fetched(name))
    tokenizer.template  # noqa: B018 a missing one is said now, not after the model was loaded
    return tokenizer


def _fetched(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        told = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"models={name} with engine.weights=hub: expected a repository with a tokenizer; {told}"
        ) from error


def _is_ours(settings: PicBench) -> bool:
    return settings.tokenizer is None and settings.engine.weights == "random"


def texts_of(settings: PicBench) -> Texts:
    """Words that the tokenizer makes one token of, where it is ours."""
    texts = one_token_words(settings.seed) if _is_ours(settings) else fresh_words(settings.seed)
    if settings.trials > texts.trials(settings.documents):
        most = texts.trials(settings.documents)
        raise ValueError(
            f"trials={settings.trials} with documents={settings.documents}: expected at most {most}, "
            "so that no two documents begin alike"
        )
    return texts


def choice_of(settings: PicBench, name: str, tokenizer: ChatTokenizer) -> ModelChoice:
    """The model to load; random weights get as many token ids as the tokenizer has, where they would have fewer."""
    engine, device = settings.engine, device_of(settings.engine)
    plain = ModelChoice(name, engine.weights, engine.path, dtype=engine.dtype, device=device, seed=engine.seed)
    known = read_config(plain).vocab_size
    if tokenizer.vocab_size <= known:
        return plain
    if engine.weights != "random":
        raise ValueError(
            f"tokenizer={tokenizer.name} has {tokenizer.vocab_size} token ids and {name} {known}: "
            "expected the model's own tokenizer"
        )
    return replace(plain, overrides={"vocab_size": tokenizer.vocab_size})


def lay_ground(settings: PicBench, name: str) -> Ground:
    """Load one model and everything that its arms share."""
    tokenizer = tokenizer_of(settings, name)
    texts = texts_of(settings)
    model = load_model(choice_of(settings, name, tokenizer))
    return Ground(name, model, model.spec(), rates.measure(model.dtype, model.device), tokenizer, texts)
