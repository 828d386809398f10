"""Names of run folders are valid in a shell, readable, and distinct."""

import re

import pytest

from spanlab.study.folder import folder_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("quality_sim", "quality_sim"),
        ("quality_sim,seeds=[0,1],store.total_gib=16", "quality_sim__seeds=0+1__store.total_gib=16"),
        ("quality_sim,only=[none, radix_1]", "quality_sim__only=none+radix_1"),
        ("smoke,load.arms=[],workload.path=/a/b.parquet", "smoke__load.arms=__workload.path=:a:b.parquet"),
        ("smoke,+strategy@arms.mine=radix", "smoke__+strategy@arms.mine=radix"),
    ],
)
def test_overrides_stay_readable(text, name):
    assert folder_name(text) == name


@pytest.mark.parametrize("text", ["a,b='x y'", "a,b={c:1}", "a,b=[[1],[2]]", "a,b=$(ls)*?", f"a,b={'c' * 200}"])
def test_other_names_end_in_a_hash(text):
    name = folder_name(text)
    assert re.fullmatch(r"[\w.=+:@%~-]{1,120}", name)
    assert name != folder_name(f"{text} ")


def test_two_lists_never_share_a_name():
    assert folder_name("a,only=[x,y]") != folder_name("a,only=[x_y]")
