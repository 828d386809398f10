"""Server logs: one module per format; a log is recognised by its content and read into columns of numbers."""

from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.read import LogSettings, read_log

__all__ = ["Ids", "Log", "LogSettings", "read_log"]
