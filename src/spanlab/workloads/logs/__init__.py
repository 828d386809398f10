"""Logs of servers: each format is a file of its own, recognised by its content, and becomes columns of numbers."""

from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.read import LogSettings, read_log

__all__ = ["Ids", "Log", "LogSettings", "read_log"]
