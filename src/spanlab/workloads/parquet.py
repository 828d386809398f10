"""Columns of a Parquet file as NumPy views, with one-sentence errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.core.request import Tokens
from spanlab.workloads.files import check_one_column, existing_file

if TYPE_CHECKING:
    import pyarrow

LARGEST_TOKEN = np.iinfo(np.int32).max


def read_columns(path: Path | None, columns: Sequence[str], key: str, expected: str) -> pyarrow.Table:
    """Read `columns`; raise ValueError for an unreadable or empty file, a missing column or a missing value."""
    import pyarrow
    from pyarrow import parquet

    path = existing_file(path, key, expected)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for column in columns:
                check_one_column(names, column, path, key, expected)
            table = file.read(columns=list(columns))
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{key}={path} is not a readable Parquet file; expected {expected}") from error
    if table.num_rows == 0:
        raise ValueError(f"{key}={path} holds no rows; expected {expected}")
    for column in columns:
        if table[column].null_count:
            raise ValueError(f"{key}={path} has empty values in column {column!r}; expected {expected}")
    return table


def token_lists(
    table: pyarrow.Table, column: str, path: Path, key: str, expected: str, fold: int | None = None
) -> tuple[Tokens, ...]:
    """Return a column of integer lists as int32 token ids, modulo `fold` if given, without a copy per row."""
    import pyarrow

    lists = table[column].combine_chunks()
    list_type = lists.type
    is_list = pyarrow.types.is_list(list_type) or pyarrow.types.is_large_list(list_type)
    if not is_list or not pyarrow.types.is_integer(list_type.value_type):
        raise ValueError(
            f"{key}={path} has column {column!r} of type {list_type}; expected lists of integers, as {expected}"
        )
    if lists.values.null_count:
        raise ValueError(f"{key}={path} has empty token ids in column {column!r}; expected {expected}")
    offsets = _view(lists.offsets)
    if (np.diff(offsets) == 0).any():
        raise ValueError(f"{key}={path} has a row without tokens in column {column!r}; expected {expected}")
    ids = _token_ids(_view(lists.values), fold, f"{key}={path} has column {column!r}")
    return tuple(ids[start:stop] for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def integers(table: pyarrow.Table, column: str, path: Path, key: str, expected: str) -> NDArray[np.integer]:
    """Return a column of integers, shape (rows,); raise ValueError for any other type."""
    import pyarrow

    values = table[column].combine_chunks()
    if not pyarrow.types.is_integer(values.type):
        raise ValueError(f"{key}={path} has column {column!r} of type {values.type}; expected integers, as {expected}")
    return _view(values)


def group_numbers(table: pyarrow.Table, column: str, path: Path, key: str, expected: str) -> list[int]:
    """Return a column of names as numbers by first appearance."""
    import pyarrow

    values = table[column].combine_chunks()
    if pyarrow.types.is_nested(values.type):
        raise ValueError(f"{key}={path} has column {column!r} of type {values.type}; expected names, as {expected}")
    numbers: list[int] = values.dictionary_encode().indices.to_pylist()
    return numbers


def _view(array: pyarrow.Array) -> NDArray[np.integer]:
    # Not array.to_numpy(): that imports pandas, which takes longer than reading the file.
    view: NDArray[Any] = np.from_dlpack(array)  # callers check that the type is an integer
    return view


def _token_ids(ids: NDArray[np.integer], fold: int | None, subject: str) -> Tokens:
    if ids.min() < 0 or ids.max() > LARGEST_TOKEN:
        raise ValueError(f"{subject} with ids from {ids.min()} to {ids.max()}; expected 0 to {LARGEST_TOKEN}")
    return (ids if fold is None else ids % fold).astype(np.int32, copy=False)
