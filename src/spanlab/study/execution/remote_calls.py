"""HTTP calls of one run on a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from spanlab.analysis.endpoint import api_key
from spanlab.replay.endpoint import Endpoint, FailedRequestError, Patience
from spanlab.replay.schedule import Calls, Replay
from spanlab.settings import Study
from spanlab.workloads.tokenizer import find_tokenizer
from spanlab.workloads.writers.bodies import Bodies
from spanlab_sim.source import Source

if TYPE_CHECKING:
    from spanlab.study.execution.remote import Answers

_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


async def replay(study: Study, source: Source, answers: Answers) -> None:
    """Send all requests of a source to the study's server."""
    settings = study.replay
    key = api_key("replay.api_key_variable", settings.api_key_variable)
    patience = Patience(settings.timeout_s, settings.request_timeout_s)
    async with Endpoint(str(study.base_url), key, patience) as endpoint:
        bodies = await _bodies(study, endpoint)
        if settings.reset_path is not None:
            await _reset(endpoint, settings.reset_path)
        calls = Calls(
            endpoint,
            bodies.call,
            lambda request: orjson.dumps(bodies.body(request) | _STREAMED, option=orjson.OPT_SERIALIZE_NUMPY),
            answers.answered,
            answers.failed,
        )
        await Replay(calls, source).run()


async def _bodies(study: Study, endpoint: Endpoint) -> Bodies:
    settings = study.replay
    tokenizer = None if settings.tokenizer is None else find_tokenizer(settings.tokenizer).tokenizer
    model = settings.served_model or await _only_model(study, endpoint)
    return Bodies(model, settings.prompts, tokenizer, settings.exact_lengths)


async def _only_model(study: Study, endpoint: Endpoint) -> str:
    try:
        models = await endpoint.models()
    except FailedRequestError as failure:
        expected = f"an OpenAI-compatible server, which lists its models at {endpoint.base_url}/models"
        raise ValueError(f"base_url={study.base_url}: expected {expected}: {failure}") from failure
    if len(models) != 1:
        names = f"one of {', '.join(models)}" if models else "a name, because the server lists no model"
        raise ValueError(f"replay.served_model=null: expected {names}")
    return models[0]


async def _reset(endpoint: Endpoint, path: str) -> None:
    try:
        await endpoint.post(path)
    except FailedRequestError as failure:
        raise ValueError(f"replay.reset_path={path}: expected a path that empties the cache: {failure}") from failure
