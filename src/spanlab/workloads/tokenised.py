"""Tokenised prompts: a Parquet table of token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spanlab.workloads.corpus import Corpus, EncodedText, Row
from spanlab.workloads.parquet import group_numbers, integers, read_columns, token_lists
from spanlab.workloads.source import workload

KEY = "workload.path"
COLUMNS = ("group_id", "idx", "tokens", "n_tokens")
EXPECTED = "a Parquet file with the columns group_id, idx, tokens and n_tokens"


@workload("tokenised", "local")
def local(path: Path, vocab_fold: int | None = None) -> Corpus:
    """Return one request per row in file order, of one ordered span; groups are numbered by first appearance."""
    table = read_columns(path, COLUMNS, KEY, EXPECTED)
    spans = token_lists(table, "tokens", path, KEY, EXPECTED, vocab_fold)
    stated = integers(table, "n_tokens", path, KEY, EXPECTED)
    mismatches = np.flatnonzero(stated != [len(span) for span in spans])
    if len(mismatches):
        row = int(mismatches[0])
        raise ValueError(
            f"{KEY}={path} has n_tokens={stated[row]} in row {row} where the column tokens holds "
            f"{len(spans[row])}; expected n_tokens to be the length of tokens"
        )
    groups = group_numbers(table, "group_id", path, KEY, EXPECTED)
    rows = tuple(Row(group, (index,)) for index, group in enumerate(groups))
    flags = np.zeros(len(spans), dtype=bool)
    detail = f"{{requests}} prompts in {{documents}} groups, {path.name}"
    return EncodedText(spans, flags, flags, rows).corpus("tokenised", "local text", detail)
