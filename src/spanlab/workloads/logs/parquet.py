"""Parquet table of prompts as token ids, with the columns group_id, idx, tokens and n_tokens."""

from __future__ import annotations

from collections.abc import Iterator

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.pieces import hash_pieces
from spanlab.workloads.logs.source import LogFile, LogFormat

COLUMNS = ["group_id", "tokens"]


@LOG_FORMATS.register("parquet")
def parquet() -> LogFormat:
    """One row per request in file order; groups are sessions."""
    return LogFormat(
        looks_for="Parquet with the columns group_id and tokens",
        recognises=lambda file: file.content.file.is_file() and file.head[:4] == b"PAR1",
        read=_read_entries,
        ids=Ids.CHAINED,
        fields=tuple(COLUMNS),
    )


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the requests, with one batch of rows in memory at a time."""
    import pyarrow
    from pyarrow import parquet as tables

    try:
        with tables.ParquetFile(file.content.file) as table:
            names = table.schema_arrow.names
            if any(names.count(column) != 1 for column in COLUMNS):
                raise ValueError(f"log={file.path}: expected one of each of the columns {', '.join(COLUMNS)}")
            group_type, token_type = (table.schema_arrow.field(column).type for column in COLUMNS)
            if pyarrow.types.is_nested(group_type):
                raise ValueError(f"log={file.path}: group_id: expected texts or numbers, not {group_type}")
            is_list = pyarrow.types.is_nested(token_type) and hasattr(token_type, "value_type")
            if not is_list or not pyarrow.types.is_integer(token_type.value_type):
                raise ValueError(f"log={file.path}: tokens: expected lists of integers, not {token_type}")
            number = 0
            for batch in table.iter_batches(batch_size=1024, columns=COLUMNS):
                for group, tokens in zip(batch["group_id"].to_pylist(), batch["tokens"], strict=True):
                    number += 1
                    if tokens.values is None or tokens.values.null_count:
                        file.refuse(number, "tokens: expected a list of token ids, not null")
                        continue
                    values = tokens.values.to_numpy()
                    if len(values) and not 0 <= values.min() <= values.max() < 1 << 31:
                        file.refuse(number, "tokens: expected token ids from 0 to below 2^31")
                        continue
                    keys, lengths = hash_pieces(values, file.piece)
                    yield Entry(keys, lengths, number, session=group)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"log={file.path}: expected a readable Parquet file") from error
