"""Setup for a child process of a node: it ends with its parent, and ignores Ctrl-C."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, and ignore Ctrl-C, which only the parent
    handles."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # If the parent died before this call, this process has a different parent by now.
    if os.getppid() != parent:
        raise SystemExit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
