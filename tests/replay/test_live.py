"""Real servers, which the study installs and starts: bash tests/run.sh -m live. Minutes, and several GB at first."""

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from spanlab.cli import compose
from spanlab.study.servers.base import Launch, free_port, running

from ..conf.conftest import spanlab as _spanlab

pytestmark = pytest.mark.live
spanlab = _spanlab  # a fixture
SMALL = (
    "workload=repeated_documents",
    "workload.output_tokens=4",
    "workload.repeated_documents.trials=1",
    "workload.repeated_documents.document_tokens=200",
    "output.figures=false",
)
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}'


def run(spanlab, root: Path, *words: str) -> dict:
    """The only run of a study; it ends with exit code 1 where reuse differs."""
    done = spanlab("-cn", "rendezvous", *SMALL, *words, f"output.root={root}", "analyses.rendezvous.fail_on=[reuse]")
    assert done.code == 0, done.err
    (path,) = root.glob("*/*/summary.json")
    (found,) = orjson.loads(path.read_bytes())["rendezvous"]["runs"]
    assert found["hit_rate"] > 0.2
    return found


SERVERS = {
    "blocks": ["arms.vllm_0_32.pool.block_size=128"],
    "tight": ["store.kv_gib=0.0024"],
    "hybrid": ["model=tiny-hybrid-experts", "arms.vllm_0_32.pool.block_size=384"],
    "windows": ["model=tiny-gemma3"],
    "drafts": [f"server.arguments=['--speculative-config','{NGRAM}']"],
}


@pytest.fixture(scope="module", params=SERVERS)
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The settings of a study on a server that was started with them; one server for several studies."""
    words = SERVERS[request.param]
    study = compose("rendezvous", words)
    with running(Launch(study, tmp_path_factory.mktemp("server"), free_port(None), 2048)) as started:
        there = ["server.engine=none", f"base_url={started.base_url}", f"server.step_log={started.launch.steps}"]
        settings = [word for word in words if not word.startswith("server.")]
        yield [*settings, *there, f"server.reset_path={started.kind.reset_path}"]


@pytest.mark.parametrize("clients", [1, 4])
def test_every_step_of_vllm_is_ours(vllm: list[str], clients: int, spanlab, tmp_path: Path):
    found = run(spanlab, tmp_path, *vllm, f"arrivals.clients={clients}")
    assert found["differing_steps"] == 0
    assert found["same_course"] == found["requests"]


@pytest.mark.parametrize(
    "words",
    [
        [
            "only=[mistralrs_0_9]",
            "baseline=mistralrs_0_9",
            "server.engine=mistralrs",
            "arms.mistralrs_0_9.options.prefix_cache_n=null",
        ],
        ["only=[llama_cpp]", "baseline=llama_cpp", "server.engine=llama_cpp"],
    ],
    ids=["mistralrs", "llama_cpp"],
)
def test_reuse_of_other_servers_is_the_preset_s(words: list[str], spanlab, tmp_path: Path):
    run(spanlab, tmp_path, "arms=presets", *words, "arrivals.clients=1")


def test_our_engine_reuses_what_vllm_reuses(spanlab, tmp_path: Path):
    words = ["arrivals.clients=1", "analyses.rendezvous.engine=true", "engine.device=cpu", "engine.threads=1"]
    found = run(spanlab, tmp_path, *words)
    assert found["same_engine"] == found["same_reuse"] == found["requests"]
    assert found["engine_hit_rate"] == found["hit_rate"]
