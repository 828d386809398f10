"""Real servers, which the study installs and starts: bash tests/run.sh -m live. Minutes, and several GB at first."""

from pathlib import Path

import orjson
import pytest

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
TWO_BYTES = "model=tiny-hybrid-experts"
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":3,"prompt_lookup_min":1}'


def run(spanlab, root: Path, *words: str) -> dict:
    """The only run of a study; it ends with exit code 1 where reuse differs."""
    done = spanlab("-cn", "rendezvous", *SMALL, *words, f"output.root={root}", "analyses.rendezvous.fail_on=[reuse]")
    assert done.code == 0, done.err
    (path,) = root.glob("*/*/summary.json")
    (found,) = orjson.loads(path.read_bytes())["rendezvous"]["runs"]
    assert found["hit_rate"] > 0.2
    return found


@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize(
    "words",
    [
        ["arms.vllm_0_32.pool.block_size=128"],
        ["store.kv_gib=0.0024"],
        [TWO_BYTES, "arms.vllm_0_32.pool.block_size=384"],
        [f"server.arguments=['--speculative-config','{NGRAM}']"],
    ],
    ids=["blocks", "tight", "hybrid", "drafts"],
)
def test_every_step_of_vllm_is_ours(words: list[str], clients: int, spanlab, tmp_path: Path):
    found = run(spanlab, tmp_path, *words, f"arrivals.clients={clients}")
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
