"""Objects of an engine that attention needs besides the query rows."""

from __future__ import annotations

from typing import NamedTuple

from spanlab.core.spans import SpanSettings
from spanlab.engine.model import SpanModel
from spanlab.engine.page_table import PageTable
from spanlab.engine.pool import PagePool
from spanlab_kernels.angles import AngleTable


class AttentionContext(NamedTuple):
    """Model, KV pool, page table, RoPE angles and key layout."""

    model: SpanModel
    pool: PagePool
    pages: PageTable
    angles: AngleTable
    key_layout: SpanSettings
