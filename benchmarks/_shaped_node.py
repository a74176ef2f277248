"""`peerloom` with some links slowed down in user space, only for benchmarks.

PEERLOOM_SHAPED names a JSON file with bytes per second by peer id (hexadecimal), which may change at any
time. Each whole message that this node sends to such a peer on a stream is delayed accordingly.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from node.main import run
from node.transport.streams import SecureStream

FILE = Path(os.environ["PEERLOOM_SHAPED"])
_free: dict[str, float] = {}
_read: tuple[float, dict[str, float]] = (0.0, {})


def _rates() -> dict[str, float]:
    global _read
    changed = FILE.stat().st_mtime if FILE.exists() else 0.0
    if changed != _read[0]:
        _read = changed, json.loads(FILE.read_text())
    return _read[1]


def _shape(original: Any) -> Any:
    async def send(self: SecureStream, message: Any, *payload: Any) -> None:
        peer = self.peer.hex()
        rate = _rates().get(peer)
        if rate is not None:
            size = len(message) + sum(memoryview(piece).nbytes for piece in payload)
            _free[peer] = max(trio.current_time(), _free.get(peer, 0.0)) + size / rate
            await trio.sleep_until(_free[peer])
        await original(self, message, *payload)

    return send


if __name__ == "__main__":
    SecureStream.send = _shape(SecureStream.send)  # type: ignore[method-assign]  # for this process alone
    sys.exit(run(sys.argv[1:]))
