"""Families of arms are named for one analysis, and of arms that there are."""

import pytest

from spanlab.cli import compose

BOTH = "analyses=[summary,families]"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([BOTH], r"families=\{\}: expected two families or more"),
        ([BOTH, "+families.a=[none]"], r"families=.*: expected two families or more"),
        ([BOTH, "+families.a=[none]", "+families.b=[pik]"], r"families\.b=pik: expected one of .*pic"),
        (
            ["analyses=[break_even]", "+families.prefix=[none]"],
            r"families=.*break_even: expected prefix, cached_order,",
        ),
    ],
)
def test_families_that_cannot_be_compared_are_refused(overrides, sentence):
    with pytest.raises(Exception, match=sentence):
        compose("pic_sim", overrides)
