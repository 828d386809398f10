"""Workloads: texts, their shapes, traces, token-id tables and made-up prompts become requests."""

from spanlab.workloads.load import load_workload
from spanlab.workloads.make_shape import make_shape
from spanlab.workloads.rag import RagOptions
from spanlab.workloads.ragpulse import RagPulseOptions
from spanlab.workloads.synthetic import SyntheticOptions
from spanlab.workloads.unavailable import SourceUnavailable
from spanlab.workloads.workload import Provenance, Workload

__all__ = [
    "Provenance",
    "RagOptions",
    "RagPulseOptions",
    "SourceUnavailable",
    "SyntheticOptions",
    "Workload",
    "load_workload",
    "make_shape",
]
