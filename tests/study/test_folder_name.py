"""The name of a run's folder needs no quotes in a shell, and differs where the settings differ."""

from __future__ import annotations

import shlex

import pytest

from spanlab.study.folder import folder_name


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("quality_sim", "quality_sim"),
        ("quality_sim,store.total_gib=16", "quality_sim,store.total_gib=16"),
        ("smoke,only=[none,dp_3],seeds=[0]", "smoke,only=none+dp_3,seeds=0"),
        ("smoke,workload.path=a/b.json", "smoke,workload.path=a:b.json"),
    ],
)
def test_lists_lose_their_brackets(words: str, name: str):
    assert folder_name(words) == name


@pytest.mark.parametrize("words", ["a,b='c d'", "a,b={x:1}", 'a,sweep=["b=1,2"]', "a,b=[[1],[2]]", "a,b=*", "a" * 300])
def test_names_are_shell_words_of_bounded_length(words: str):
    name = folder_name(words)
    assert shlex.quote(name) in (name, f"'{name}'")
    assert not set(name) & set("*?[]{}'\"$ ();&|<>")
    assert len(name) <= 120


def test_names_that_lose_characters_stay_apart():
    names = {folder_name(words) for words in ("a,b=x*", "a,b=x", "a,b=x?", f"{'a' * 200}1", f"{'a' * 200}2")}
    assert len(names) == 5
