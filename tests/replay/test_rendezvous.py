"""A server, the simulator and our engine on one workload: reused tokens, request by request."""

import re
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study

from ..conf.conftest import spanlab as _spanlab

spanlab = _spanlab  # a fixture
WORKLOAD = (
    "workload=synthetic",
    "workload.output_tokens=3",
    "workload.synthetic.groups=3",
    "workload.synthetic.requests_per_group=4",
    "workload.synthetic.prompt_tokens=90",
    "workload.synthetic.kind=fixed",
    "workload.synthetic.unit=tokens",
    "workload.synthetic.value=70",
)
ENGINE = (
    "engine.device=cpu",
    "engine.threads=1",
    "server.engine=none",
    "server.reset_path=/reset",
    "model=tiny",
    "arms.vllm_0_32.pool.block_size=16",
    "arrivals.clients=1",
    "analyses.rendezvous.engine=true",
    "output.figures=false",
    "output.run=x",
)


def words(url: str, *more: str) -> Sequence[str]:
    return [*WORKLOAD, *ENGINE, f"base_url={url}", *more]


def test_server_simulator_and_engine_reuse_the_same_tokens(serve, tmp_path: Path):
    server = serve()
    folder = run_study(compose("rendezvous", words(server.url)), "rendezvous", tmp_path, show=False)
    ((run,), broken) = orjson.loads((folder / "summary.json").read_bytes())["rendezvous"].values()
    assert (run["requests"], run["same_reuse"], run["same_engine"], broken) == (12, 12, 12, [])
    # of the three requests that follow the first of each group, four blocks of 70 shared tokens
    assert run["hit_rate"] == run["our_hit_rate"] == run["engine_hit_rate"] == 3 * 3 * 64 / (12 * 90)
    assert len(server.received()["requests"]) == 12, "the engine asks no server"


def test_a_server_that_reuses_less_than_the_engine_fails(serve, spanlab, tmp_path: Path):
    given = words(serve(counts={"prompt_tokens_details": {"cached_tokens": 16}}).url, f"output.root={tmp_path}")
    done = spanlab("-cn", "rendezvous", *given, "analyses.rendezvous.fail_on=[engine]")
    assert done.code == 1, done.err
    (path,) = tmp_path.glob("*/x/summary.json")
    rendezvous = orjson.loads(path.read_bytes())["rendezvous"]
    assert rendezvous["broken"] == ["reuse", "engine"]
    assert rendezvous["runs"][0]["same_engine"] == 0


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["arms.vllm_0_32.pool.block_size=null"], "arms.vllm_0_32.pool.block_size=null: expected the size of the"),
        (["model=tiny-hybrid"], "model.name=tiny-hybrid: expected layers of attention alone"),
        (
            ["arms=presets", "only=[llama_cpp]", "baseline=llama_cpp"],
            "arms.llama_cpp, policy=slots: expected an arm with a pool of blocks",
        ),
        (
            ["analyses.rendezvous.engine=false", "analyses.rendezvous.fail_on=[engine]"],
            r"fail_on=\['engine'\]: expected analyses.rendezvous.engine=true too",
        ),
    ],
)
def test_caches_that_the_engine_does_not_have_are_refused(more: list[str], problem: str):
    with pytest.raises(ValueError, match=re.compile(problem)):
        compose("rendezvous", words("http://localhost:1", *more))
