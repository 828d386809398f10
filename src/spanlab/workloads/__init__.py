"""Workloads: requests from texts, measured shapes, traces, tables of token ids, and synthetic
prompts."""

from spanlab.workloads import alias, chats, queries, questions, reading, synthetic  # noqa: F401 - register kinds
from spanlab.workloads.files import SourceUnavailable
from spanlab.workloads.load import WORKLOADS, WorkloadSettings, load_workload
from spanlab.workloads.logs import read  # noqa: F401 - registers the kind log
from spanlab.workloads.make_shape import make_shape
from spanlab.workloads.rag import Rag
from spanlab.workloads.ragpulse import RagPulse
from spanlab.workloads.synthetic import Synthetic
from spanlab.workloads.workload import Provenance, Workload

__all__ = [
    "WORKLOADS",
    "Provenance",
    "Rag",
    "RagPulse",
    "SourceUnavailable",
    "Synthetic",
    "Workload",
    "WorkloadSettings",
    "load_workload",
    "make_shape",
]
