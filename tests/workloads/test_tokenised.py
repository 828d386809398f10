"""A table of token ids is read as one request per row."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from spanlab.workloads import SourceUnavailable

from .factories import load_workload, token_lists

ROWS = {
    "group_id": ["x", "y", "x"],
    "idx": [0, 1, 2],
    "tokens": [[1, 2, 3], [7, 70_000], [1, 2]],
    "n_tokens": [3, 2, 2],
}


def make_table(path: Path, **columns) -> Path:
    parquet.write_table(
        pa.table({name: column for name, column in (ROWS | columns).items() if column is not None}), path
    )
    return path


def test_rows_keep_file_order_and_groups_are_numbered_by_first_appearance(tmp_path: Path):
    workload = load_workload("tokenised", path=make_table(tmp_path / "t.parquet"))
    assert [(r.id, r.group_id, r.tokens.tolist()) for r in workload.requests] == [
        (0, 0, [1, 2, 3]),
        (1, 1, [7, 70_000]),
        (2, 0, [1, 2]),
    ]
    assert [(len(r.spans), r.boundaries, r.spans[0].independent) for r in workload.requests] == [(1, (), False)] * 3
    assert workload.provenance.line() == "local text: 3 prompts in 2 groups, t.parquet"


def test_a_file_is_called_what_it_holds(tmp_path: Path):
    workload = load_workload("tokenised", path=make_table(tmp_path / "t.parquet")).with_name("QMSum")
    assert workload.name == "QMSum"
    assert workload.provenance.line() == "local text: QMSum, read as 3 prompts in 2 groups, t.parquet"


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16())])
def test_list_types_read_alike(tmp_path: Path, kind: pa.DataType):
    path = make_table(tmp_path / "t.parquet", tokens=pa.array([[1, 2, 3], [7, 8], [1, 2]], kind))
    workload = load_workload("tokenised", path=path)
    assert token_lists(workload) == [[1, 2, 3], [7, 8], [1, 2]]
    assert {str(r.tokens.dtype) for r in workload.requests} == {"int32"}


def test_ids_are_folded_on_request(tmp_path: Path):
    workload = load_workload("tokenised", path=make_table(tmp_path / "t.parquet"), vocab_fold=1000)
    assert workload.requests[1].tokens.tolist() == [7, 0]


def test_a_long_row_is_cut_or_dropped_on_its_own(tmp_path: Path):
    path = make_table(tmp_path / "t.parquet")
    cut = load_workload("tokenised", path=path, max_prompt_tokens=2)
    assert token_lists(cut) == [[1, 2], [7, 70_000], [1, 2]]
    assert cut.provenance.documents_cut == 1
    selected = load_workload("tokenised", path=path, max_prompt_tokens=2, too_long="drop")
    assert token_lists(selected) == [[7, 70_000], [1, 2]]
    assert [(r.id, r.group_id) for r in selected.requests] == [(0, 0), (1, 1)]


EXPECTED = "expected a Parquet file with the columns group_id, idx, tokens and n_tokens"


@pytest.mark.parametrize("column", ["group_id", "idx", "tokens", "n_tokens"])
def test_a_missing_column_is_named(tmp_path: Path, column: str):
    path = make_table(tmp_path / "t.parquet", **{column: None})
    with pytest.raises(ValueError, match=rf"workload.path=.*t.parquet has no column '{column}'; {EXPECTED}"):
        load_workload("tokenised", path=path)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"n_tokens": [3, 9, 2]}, r"has n_tokens=9 in row 1 where the column tokens holds 2; expected n_tokens to be"),
        ({"tokens": [[1, 2, 3], [], [1, 2]], "n_tokens": [3, 0, 2]}, "has a row without tokens in column 'tokens'"),
        ({"tokens": [[1, 2, 3], None, [1, 2]]}, "has empty values in column 'tokens'"),
        ({"tokens": [[1, None, 3], [1, 2], [1, 2]]}, "has empty token ids in column 'tokens'"),
        ({"tokens": [[1, -2, 3], [1, 2], [1, 2]]}, "has column 'tokens' with ids from -2 to 3; expected 0 to"),
        ({"tokens": ["a", "b", "c"]}, "has column 'tokens' of type string; expected lists of integers"),
        ({"n_tokens": ["3", "2", "2"]}, "has column 'n_tokens' of type string; expected integers"),
        ({"group_id": [[1], [1], [2]]}, "has column 'group_id' of type list.*; expected names"),
        ({name: pa.array([], pa.int64()) for name in ROWS}, "holds no rows"),
    ],
)
def test_a_bad_table_gets_its_sentence(tmp_path: Path, columns: dict, problem: str):
    with pytest.raises(ValueError, match=rf"workload.path=.*t.parquet {problem}"):
        load_workload("tokenised", path=make_table(tmp_path / "t.parquet", **columns))


def test_an_unreadable_file_is_named(tmp_path: Path):
    path = tmp_path / "t.parquet"
    path.write_bytes(b"not a table")
    with pytest.raises(ValueError, match=rf"workload.path=.*t.parquet is not a readable Parquet file; {EXPECTED}"):
        load_workload("tokenised", path=path)


def test_a_missing_file_names_the_ways_out():
    with pytest.raises(SourceUnavailable, match=r"workload.path.*alternatives: workload.source=shape"):
        load_workload("tokenised", path="nowhere.parquet")
