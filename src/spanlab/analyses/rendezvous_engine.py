"""Our engine beside a running server: the same model serves the same requests, with the same blocks."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from pathlib import Path

from spanlab.analyses.rendezvous_requests import as_served
from spanlab.build import held_token_bytes
from spanlab.core.policies.block_pool import block_shape
from spanlab.records import Record
from spanlab.settings.analyses import ANALYSES
from spanlab.settings.arms import Strategy
from spanlab.settings.server import ServerSettings
from spanlab.settings.study import Study
from spanlab.study.backends import RealEngine
from spanlab.study.jobs import Job

_KEY = "analyses.rendezvous.engine=true"


def check_engine(study: Study) -> None:
    """Raise ValueError for a server whose cache the engine does not have: it keeps blocks in a tree."""
    (name,) = study.chosen()
    pool = study.arms[name].pool
    if pool is None:
        policy = study.arms[name].policy_name
        raise ValueError(
            f"{_KEY} with arms.{name}, policy={policy}: expected an arm with a pool of blocks, as vLLM has"
        )
    if study.model.is_hybrid:
        raise ValueError(
            f"{_KEY} with model.name={study.model.name}: expected layers of attention alone, because the engine places "
            "states of recurrent layers by other rules than vLLM"
        )
    if pool.block_size is None:
        raise ValueError(f"{_KEY} with arms.{name}.pool.block_size=null: expected the size of the server's blocks")


class EngineBeside:
    """Serves runs of a server on our engine; the model is loaded once."""

    def __init__(self, study: Study) -> None:
        (name,) = study.chosen()
        pool = study.arms[name].pool
        assert pool is not None, "checked with the settings"
        size = block_shape(study.model, held_token_bytes(study), pool.block_size).size
        self._study = study
        self._strategy = Strategy(family="block_hash", match="block_hash", block_size=size)
        alone = replace(study, backend="engine", server=ServerSettings(), analyses=ANALYSES.section()())
        self._engine = RealEngine(replace(alone, arms={name: self._strategy}))

    def reused(self, job: Job) -> dict[int, int]:
        """Return the reused prompt tokens of each request of a run, from an empty cache."""
        reused: dict[int, int] = {}

        def finished(record: Record) -> None:
            reused[record.request_id] = record.reused_tokens

        requests, nowhere = as_served(self._study, job.requests), Path(os.devnull)
        unlogged = replace(job, readings=None, outputs=None, serving=None, trace=None, steps=nowhere)
        served = replace(unlogged, strategy=self._strategy, requests=requests, seen=None)
        deque(self._engine.run(served, finished), maxlen=0)
        return reused
