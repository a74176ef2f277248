"""Abusive clients in a separate process: `python -m tests.node.web.impatient PORT KEY N..`. The numbers are
those of slow readers, slow senders, huge bodies and silent connections. The process prints `ready` once all
have started, and runs until it is killed.
"""

import json
import random
import sys
from contextlib import suppress
from functools import partial

import trio

MODEL = "words"
LONG_BYTES = 4 << 20


def request(port: int, key: str, asked: object) -> bytes:
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nx-api-key: {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def main(port: int, key: str, readers: int, senders: int, bodies: int, silent: int) -> None:
    rng = random.Random(1)
    huge = [
        request(port, key, {"model": MODEL, "prompt": "x" * size})
        for size in (LONG_BYTES - 300, LONG_BYTES + 300)
    ]
    streamed = request(port, key, {"model": MODEL, "prompt": "a", "max_tokens": 4_000, "stream": True})
    short = request(port, key, {"model": MODEL, "prompt": "a", "max_tokens": 2})

    async def each(data: bytes, *, pause: float, reads: bool) -> None:
        """Send the same bytes repeatedly, whole or a byte every `pause`. Read the answer, or nothing."""
        while True:
            with suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                    if pause:
                        for byte in data:
                            await stream.send_all(bytes([byte]))
                            await trio.sleep(pause)
                    else:
                        await stream.send_all(data)
                    if not reads:
                        await trio.sleep_forever()
                    while await stream.receive_some(65_536):
                        pass
            await trio.sleep(0.2)

    async with trio.open_nursery() as nursery:
        begin = nursery.start_soon
        for _ in range(readers):
            begin(partial(each, streamed, pause=0, reads=False))
        for _ in range(senders):
            begin(partial(each, short, pause=rng.uniform(0.01, 0.1), reads=True))
        for number in range(bodies):
            begin(partial(each, huge[number % 2], pause=0, reads=True))
        for _ in range(silent):
            begin(partial(each, b"", pause=0, reads=False))
        await trio.sleep(0.5)
        print("ready", flush=True)  # noqa: T201 - its protocol


if __name__ == "__main__":
    trio.run(partial(main, int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
