"""Blocks of hybrid models have the sizes that vLLM's own functions compute.

`vllm_0_32_blocks.json` holds vLLM's answers for the hybrids of `conf/model`; the marker `oracle` asks again.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from spanlab.core.policies.block_pool import BLOCK
from spanlab.model_files import choices, find_config, find_spec
from spanlab_sim.timings import Deployment

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "vllm_0_32_blocks.json").read_text())["models"]
PYTHON = Path(os.environ.get("SPANLAB_ORACLE_VLLM", HERE.parents[1] / ".venvs/vllm/bin/python"))
#: Without latents, whose blocks depend on the kernel that a card has.
HYBRIDS = [name for name in choices() if find_spec(name).is_hybrid and not find_spec(name).has_latents]
#: Format of KV, drafts, devices, and vLLM's answer: tokens of a block, bytes of a layer's state, groups of states.
ASKED = [(name, *key.split(", "), told) for name in sorted(EXPECTED) for key, told in EXPECTED[name].items()]


def test_every_shipped_hybrid_has_been_asked_for():
    assert sorted(EXPECTED) == HYBRIDS


@pytest.mark.parametrize(("name", "kv", "drafts", "devices", "told"), ASKED)
def test_blocks_of_hybrids_are_as_large_as_vllms(name, kv, drafts, devices, told):
    model, (tokens, state_bytes, groups) = find_spec(name), told
    drafted, split = int(drafts.split()[0]), int(devices.split()[0])
    in_kv_format = replace(model, kv_itemsize=1) if kv == "fp8" else model
    assert model.state_groups == groups
    if not drafted:
        assert model.state_bytes == model.recurrent_layers * state_bytes * split
        served = Deployment(tensor_parallel=split)
        assert served.block_tokens(in_kv_format, BLOCK) == tokens
    if split == 1:
        assert in_kv_format.block_tokens_per_state(BLOCK, drafted) == tokens


@pytest.mark.oracle
def test_vllm_still_computes_these_blocks(tmp_path):
    asked, out = tmp_path / "models.json", tmp_path / "told.json"
    asked.write_text(json.dumps({name: dict(find_config(name).keys) for name in HYBRIDS}))
    subprocess.run([PYTHON, HERE / "vllm_blocks_driver.py", asked, out], check=True)
    assert json.loads(out.read_text()) == EXPECTED
