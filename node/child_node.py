"""A node that ends with whoever started it; `node.demo.processes` runs this module.

Not for people. The first line on stdin is a JSON list, the arguments of `peerloom`; until it
comes, the slow imports are done. When stdin then ends, because the starter has closed it or has died
in any way, the node says goodbye as on Ctrl-C. A pipe rather than a signal of the kernel: it works on
every system, and Linux sends that signal already when the *thread* that forked ends.
"""

import json
import os
import signal
import sys
import threading
import time

LEAVING_SECONDS_MAX = 10.0
"""How long an abandoned node may take for its goodbye; then it ends at once."""


def main() -> int:
    """Wait for the arguments, then be a node. The exit code is the node's."""
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
    # Not sys.stdin: its lock, held by a waiting thread, would break the interpreter's end.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LEAVING_SECONDS_MAX)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
