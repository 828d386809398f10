"""Records that are read back as columns: numbers, missing numbers and objects."""

import io
import json
from dataclasses import fields

import numpy as np

from spanlab.records import Record
from spanlab.study.numbers import read_records

KINDS = {"int": 1, "float": 0.5, "bool": True}


def test_columns_have_the_types_of_their_values():
    plain = {field.name: KINDS.get(str(field.type)) for field in fields(Record)}
    rows = [plain | {"tiers": {"host": 3}}, plain | {"rate_rps": 2.0, "counted": False, "tiers": {"host": 4}}]
    columns = read_records(io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    assert np.isnan(columns["rate_rps"][0])
    assert columns["rate_rps"][1] == 2.0
    assert columns["counted"].tolist() == [True, False]
    assert columns["counted"].dtype == np.bool_
    assert columns["tiers"].tolist() == [{"host": 3}, {"host": 4}]
    assert {columns[name].dtype for name in ("seed", "arrived_s")} == {np.dtype(np.int64), np.dtype(np.float64)}
