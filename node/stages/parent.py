"""A child process of a node: it ends with its parent, and ignores Ctrl-C."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends; only the parent receives Ctrl-C."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the parent died before the kernel knew, this process has another parent by now.
    if os.getppid() != parent:
        raise SystemExit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
