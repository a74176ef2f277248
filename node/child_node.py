"""A node that stops when the process that started it ends; `node.demo.processes` runs this module.

It is not meant for people. The first line on stdin is a JSON list with the arguments of `peerloom`; slow
imports are done before it arrives. When stdin then ends, because the starter closed it or died, the node
leaves the swarm as on Ctrl-C. A pipe is used in place of Linux's parent-death signal because it works on
every system, and because Linux already sends that signal when the *thread* that forked ends.
"""

import json
import os
import signal
import sys
import threading
import time

LEAVING_SECONDS_MAX = 10.0
"""How many seconds an abandoned node may take to leave the swarm before it is killed."""


def main() -> int:
    """Wait for the arguments, then run the node. Return the node's exit code."""
    import node.runtime
    from node.errors import EXIT_DONE
    from node.main import run

    assert node.runtime, "imported for its time, not for its name"
    line = sys.stdin.buffer.readline()
    if not line:
        return EXIT_DONE
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    return run(json.loads(line))


def _end_with_stdin() -> None:
    # Not sys.stdin: the waiting thread would hold its lock, which breaks the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVING_SECONDS_MAX)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
