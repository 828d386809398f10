"""Settings of `backend=server`: requests to a real server."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanlab.analysis.endpoint import check_address
from spanlab.checks import positive
from spanlab.workloads.writers.bodies import check_prompts

if TYPE_CHECKING:
    from spanlab.settings.study import Study

SERVER = "server"
_PATH = re.compile(r"/(?!/)[!-~]*")  # printable; two slashes would name another host


@dataclass
class ReplaySettings:
    """Requests to the server at `base_url`; backend=server only.

    `served_model`       name of the model in requests; null: the only model of the server
    `prompts`            tokens: ids below the model's vocabulary; text; messages: one user message
    `tokenizer`          decodes the ids of text prompts: tokenizer.json, its folder, or a hub name
    `exact_lengths`      request outputs of the workload's lengths by ignore_eos and min_tokens (vLLM, SGLang)
    `timeout_s`          longest time without data from the server, seconds
    `request_timeout_s`  longest time from sending a request to the end of its answer, seconds
    `api_key_variable`   environment variable that holds the API key; empty: none
    `reset_path`         path to POST to before each run, which resets the server's prefix cache; null: none
    """

    served_model: str | None = None
    prompts: str = "tokens"
    tokenizer: str | None = None
    exact_lengths: bool = True
    timeout_s: float = 600.0
    request_timeout_s: float = 3600.0
    api_key_variable: str = ""
    reset_path: str | None = None

    def __post_init__(self) -> None:
        check_prompts("replay", self.prompts, self.tokenizer)
        positive("replay.timeout_s", self.timeout_s)
        positive("replay.request_timeout_s", self.request_timeout_s)
        if self.reset_path is not None and not _PATH.fullmatch(self.reset_path):
            raise ValueError(
                f"replay.reset_path={self.reset_path}: expected a path of the server, as /reset_prefix_cache"
            )


def check_replay(study: Study) -> None:
    """Raise ValueError for an address without backend=server, and for settings that a server cannot follow."""
    if study.backend != SERVER:
        if study.base_url is not None:
            raise ValueError(f"base_url={study.base_url} with backend={study.backend}: expected backend=server")
        return
    if study.base_url is None:
        raise ValueError("base_url is not set with backend=server: expected the address of a server, http://HOST:PORT")
    check_address("base_url", study.base_url)
    if len(study.chosen()) != 1:
        raise ValueError(f"only={study.only} with backend=server: expected one arm, for the server is one")
    if study.workers not in (None, 1):
        raise ValueError(f"workers={study.workers} with backend=server: expected 1")
    if study.executor.kind != "local":
        raise ValueError(f"executor.kind={study.executor.kind} with backend=server: expected local")
