"""What attention over one engine's pool needs beside the rows."""

from __future__ import annotations

from typing import NamedTuple

from spanlab.core.spans import SpanSettings
from spanlab.engine.model import SpanModel
from spanlab.engine.page_table import PageTable
from spanlab.engine.pool import PagePool
from spanlab_kernels.angles import AngleTable


class Reader(NamedTuple):
    """Model, pool, the table of the pages that rows read, angles, and how keys are read."""

    model: SpanModel
    pool: PagePool
    pages: PageTable
    angles: AngleTable
    key_layout: SpanSettings
