"""A child process of a node: it ends with its parent, and leaves Ctrl-C to it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent, of this id, ends; Ctrl-C reaches the parent alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the kernel was told: then this process has another one by now.
    if os.getppid() != parent:
        raise SystemExit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
