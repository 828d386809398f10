"""Prompts that were tokenised elsewhere: a Parquet table of token ids."""

from __future__ import annotations

import numpy as np

from spanlab.workloads.corpus import Corpus, Row
from spanlab.workloads.encoded_text import EncodedText
from spanlab.workloads.parquet import integers, read_columns, token_lists
from spanlab.workloads.text_source import TextOptions

KEY = "workload.path"
COLUMNS = ("group_id", "idx", "tokens", "n_tokens")
EXPECTED = "a Parquet file with the columns group_id, idx, tokens and n_tokens"


def local(options: TextOptions) -> Corpus:
    """One request a row in file order, each one ordered span; groups are numbered by first appearance."""
    table = read_columns(options.path, COLUMNS, KEY, EXPECTED)
    assert options.path is not None, "read_columns lets no missing path through"
    spans = token_lists(table, "tokens", options.path, KEY, EXPECTED, options.vocab_fold)
    stated = integers(table, "n_tokens", options.path, KEY, EXPECTED)
    wrong = np.flatnonzero(stated != [len(span) for span in spans])
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"{KEY}={options.path} has n_tokens={stated[row]} in row {row} where the column tokens holds "
            f"{len(spans[row])}; expected n_tokens to be the length of tokens"
        )
    groups = table["group_id"].combine_chunks().dictionary_encode().indices.to_pylist()
    rows = tuple(Row(group, (index,)) for index, group in enumerate(groups))
    flags = np.zeros(len(spans), dtype=bool)
    detail = f"{{requests}} prompts in {{documents}} groups, {options.path.name}"
    return EncodedText(spans, flags, flags, rows).corpus("tokenised", "local text", detail)
