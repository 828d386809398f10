"""Cases of a schedule comparison that make no sense name the key, what it is and what was expected."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from spanlab.schedule.cases import read_cases

CASE: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 9,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "requests": [{"tokens": [1, 2], "output_len": 1}],
}
HYBRID = CASE | {"mamba_mode": "align"}
WRONG = {
    "another mode": (CASE | {"mamba_mode": "all"}, "a.mamba_mode=all: expected null or align"),
    "groups of no states": (CASE | {"state_groups": 2}, "a.state_groups=2: expected mamba_mode=align beside it"),
    "no group of states": (HYBRID | {"state_groups": 0}, "a.state_groups=0: expected a whole number of 1 or more"),
    "a share of a group": (HYBRID | {"state_groups": 1.5}, "a.state_groups=1.5: expected a whole number"),
    "states within blocks": (HYBRID | {"retention": 24}, "a.retention=24: expected a multiple of block_size=16"),
    "drafts of a hybrid": (HYBRID | {"draft_tokens": 2}, "a.draft_tokens=2 with mamba_mode=align: expected 0"),
    "drafts by nobody": (CASE | {"draft_tokens": 2, "draft_method": "mtp"}, "a.draft_method=mtp: expected ngram or"),
    "a drafter of nothing": (CASE | {"draft_method": "eagle"}, "a.draft_method=eagle: expected draft_tokens beside it"),
    "an unknown key": (CASE | {"blocks": 2}, "a.blocks: no such key; expected async_scheduling, block_size"),
    "no size": ({key: CASE[key] for key in CASE if key != "num_blocks"}, "a.num_blocks is missing"),
    "no tokens": (CASE | {"requests": [{"tokens": [], "output_len": 1}]}, "a.requests[0].tokens: expected a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_case_is_one_sentence(tmp_path, wrong):
    given, sentence = WRONG[wrong]
    (tmp_path / "cases.json").write_text(json.dumps({"a": given}))
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        read_cases(tmp_path / "cases.json")


@pytest.mark.parametrize(("case", "groups"), [(CASE, 0), (HYBRID, 1), (HYBRID | {"state_groups": 3}, 3)])
def test_states_have_one_group_where_nothing_is_said(tmp_path, case, groups):
    (tmp_path / "cases.json").write_text(json.dumps({"a": case}))
    assert [one.state_groups for one in read_cases(tmp_path / "cases.json")] == [groups]
