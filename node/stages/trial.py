"""The process that tests the fences: `python -m node.stages.trial DEVICE` prints those that hold.

It imports little, because every node starts it: the rest of the package would take five times as long.
"""

import json
import os
import sys

from node.stages import sandbox

_BYTES = 64 << 20

if __name__ == "__main__":
    fenced = sandbox.enter(scratch=os.getcwd(), device=sys.argv[1], memory_bytes=_BYTES, allow_unfenced=True)
    sys.stdout.write(json.dumps({"fences": fenced.fences, "unfenced": fenced.unfenced}))
