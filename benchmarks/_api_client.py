"""The client of benchmarks/api.py, in a process that loads nothing else. Usage: `_api_client.py PORT KEY`."""

import json
import re
import sys
import time

import trio

NAME = "words"
PROMPT = 64
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99_999_999}, "minItems": 400}
"""The schema of constrained answers; they can be longer than any requested answer."""
MADE = re.compile(rb'"completion_tokens":([0-9]+)')


def prompt_of(number: int) -> str:
    """Return the prompt of stream `number`; all prompts differ."""
    return f"{number:04d} once upon a time, far away from every network, a node ".ljust(PROMPT)[:PROMPT]


async def read_stream(
    port: int, key: str, number: int, tokens: int, marks: list[float], *, is_held: bool = False
) -> int:
    """Request a stream, and append the times of the request and of each event to `marks`. Return the number
    of its tokens."""
    asked: dict[str, object] = {
        "model": NAME,
        "prompt": prompt_of(number),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if is_held:
        asked["structured_outputs"] = {"json": SCHEMA}
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
    return int(MADE.findall(received)[-1])


async def ask_over_http(
    port: int, key: str, streams: int, tokens: int, is_held: bool
) -> tuple[list[list[float]], int]:
    """Return the event times of this many concurrent streams, and the number of tokens of all."""
    marks: list[list[float]] = [[] for _ in range(streams)]
    made: list[int] = []

    async def read(number: int) -> None:
        made.append(await read_stream(port, key, number, tokens, marks[number], is_held=is_held))

    async with trio.open_nursery() as nursery:
        for number in range(streams):
            nursery.start_soon(read, number)
    return marks, sum(made)


def client(port: int, key: str) -> None:
    """Read lines such as `streams tokens` (with `held` for a schema) from the input; answer each with the
    figures of one round."""
    for line in sys.stdin:
        streams, tokens, *held = line.split()
        marks, made = trio.run(ask_over_http, port, key, int(streams), int(tokens), bool(held))
        print(json.dumps(figures(marks, made)), flush=True)


def figures(marks: list[list[float]], tokens: int) -> dict[str, float]:
    """Return the tokens per second of a round, and the seconds to the first token of its first stream."""
    spent = max(row[-1] for row in marks) - min(row[0] for row in marks)
    return {"rate": tokens / spent, "first": marks[0][1] - marks[0][0]}


if __name__ == "__main__":
    client(int(sys.argv[1]), sys.argv[2])
