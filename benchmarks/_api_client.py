"""The client of benchmarks/api.py, in a process that loads nothing else: `_api_client.py PORT KEY`."""

import json
import sys
import time

import trio

NAME = "words"
PROMPT = 64


def prompt_of(number: int) -> str:
    """What stream `number` asks: no two the same."""
    return f"{number:04d} once upon a time, far away from every network, a node ".ljust(PROMPT)[:PROMPT]


async def read_stream(port: int, key: str, number: int, tokens: int, marks: list[float]) -> None:
    """Ask for a stream; note when it was asked, and when each event came."""
    asked = {
        "model": NAME,
        "prompt": prompt_of(number),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        marks.append(time.perf_counter())
        await stream.send_all(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        async for chunk in stream:
            received += chunk
            marks.extend([time.perf_counter()] * chunk.count(b'"text":"'))
    assert received.startswith(b"HTTP/1.1 200"), received[:300]
    assert b"data: [DONE]" in received, received[-300:]


async def ask_over_http(port: int, key: str, streams: int, tokens: int) -> list[list[float]]:
    """Return the marks of so many streams at once."""
    marks: list[list[float]] = [[] for _ in range(streams)]
    async with trio.open_nursery() as nursery:
        for number, row in enumerate(marks):
            nursery.start_soon(read_stream, port, key, number, tokens, row)
    return marks


def client(port: int, key: str) -> None:
    """Answer each line of the input, `streams tokens`, by the figures of one round."""
    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        marks = trio.run(ask_over_http, port, key, streams, tokens)
        print(json.dumps(figures(marks, streams * tokens)), flush=True)


def figures(marks: list[list[float]], tokens: int) -> dict[str, float]:
    """Return the tokens a second of a round, and the seconds to the first token of its first stream."""
    spent = max(row[-1] for row in marks) - min(row[0] for row in marks)
    return {"rate": tokens / spent, "first": marks[0][1] - marks[0][0]}


if __name__ == "__main__":
    client(int(sys.argv[1]), sys.argv[2])
