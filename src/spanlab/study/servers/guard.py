"""Runs a command, and ends it with all of its processes when standard input closes: python guard.py
COMMAND….

The study holds the other end of that pipe. However the study ends, also by SIGKILL, the pipe closes
and no server is left behind. It runs in the environment of the server: standard library alone,
nothing of spanlab.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 10.0  # between the request to end and the kill
_PERIOD_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended; only Linux has this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(ancestor: int) -> list[int]:
    """Return the processes below this one, parents first; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(folder.name))
    below, at = list(children.get(ancestor, [])), 0
    while at < len(below):
        below += children.get(below[at], [])
        at += 1
    return below


def send(processes: list[int], number: int) -> None:
    """Send a signal to processes, those that have ended meanwhile left out."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def end(server: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then what it leaves behind; kill what has not ended after the time of
    grace."""
    server.terminate()
    deadline = time.monotonic() + GRACE_S
    signalled = False
    while time.monotonic() < deadline and (server.poll() is None or descendants(os.getpid())):
        if server.returncode is not None and not signalled:
            send(descendants(os.getpid()), signal.SIGTERM)
            signalled = True
        time.sleep(_PERIOD_S)
    while left := descendants(os.getpid()):
        send(left, signal.SIGKILL)
        time.sleep(_PERIOD_S)
    server.kill()
    server.wait()


def main(command: list[str]) -> int:
    """Run the command until it ends or standard input closes; return its exit status."""
    # the study's worker blocks SIGTERM; a server that inherits that would end by the kill alone
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study decides; the terminal interrupts both
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    adopt_orphans()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            readable, _, _ = select.select([0], [], [], _PERIOD_S)
            if readable and not os.read(0, 1):
                break
    finally:
        end(server)
    return server.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
