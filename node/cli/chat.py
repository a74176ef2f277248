"""`peerloom chat SERVICE`: a conversation with a served model, by the chat template of its folder.

What was said is kept in this process and nowhere else, and goes to the node with each message. Ctrl-C stops
the answer that is being given, which stays in the conversation as far as it came; Ctrl-D, or the end of the
input, ends the chat.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.client import ask, peer_names, request
from node.cli.options import DataDir, find_data_dir
from node.cli.render import show
from node.cli.serve import MinP, Temperature, TopK, TopP, answer_lines, read_seed, write_piece
from node.errors import UsageError

HISTORY_BYTES_MAX = 1 << 20
"""Messages that go with a question: less than the control channel takes. The oldest are left out beyond."""
PROMPT = "> "

Message = dict[str, str]


def chat(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="Its name, or its id.")],
    system: Annotated[
        str, typer.Option("--system", metavar="TEXT", help="What the model is told before all.")
    ] = "",
    tokens_max: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="So many at most in an answer.")
    ] = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Draw the same again.")] = "",
    data_dir: DataDir = "",
) -> None:
    """Talk with a served model; Ctrl-C stops an answer, Ctrl-D ends."""
    folder = find_data_dir(context, data_dir)
    found: dict[str, Any] = ask(folder, "services.text", {"service": service}, seconds=None)
    name = found["name"]
    if not found["has_template"]:
        raise UsageError(
            f"{name} has no chat template, by which a conversation becomes one text",
            "`peerloom generate` goes on from a text as it is",
        )
    settings = {
        "tokens_max": tokens_max,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": read_seed(seed),
    }
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        show([f"{name}: Ctrl-C stops an answer, Ctrl-D ends"], sys.stderr)
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    for said in _said(is_terminal=is_terminal):
        history.append({"role": "user", "content": said})
        answer = _answer(folder, found["service"], settings | {"messages": fitting(history)})
        history.append({"role": "assistant", "content": answer})


def _said(*, is_terminal: bool) -> Iterator[str]:
    """What a person says, a line each, until the input ends."""
    if is_terminal:
        import readline  # noqa: F401 - input() edits lines by it
    while True:
        try:
            text = input(PROMPT) if is_terminal else sys.stdin.readline()
        except EOFError:
            show([""])
            return
        except KeyboardInterrupt:
            show(["", "(Ctrl-D ends)"], sys.stderr)
            continue
        if not is_terminal and not text:
            return
        if text := text.strip():
            yield text


def _answer(folder: Path, service: str, question: dict[str, Any]) -> str:
    """Show an answer as it comes; return what of it came."""
    pieces: list[str] = []
    result: dict[str, Any] = {}
    replies = request(folder, "generate", {"service": service, "question": question})
    try:
        with closing(replies):  # type: ignore[type-var]  # a generator
            for reply in replies:
                event = reply.get("event", {})
                if "notice" in event:
                    show([event["notice"]], sys.stderr)
                elif "piece" in event:
                    pieces.append(event["piece"])
                    write_piece(event["piece"])
                result = reply.get("result", result)
    except KeyboardInterrupt:
        write_piece("\n")
        show(["(stopped)"], sys.stderr)
        return "".join(pieces)
    write_piece("\n")
    if result.get("forgotten"):
        show(
            [f"({result['forgotten']} of the oldest messages were left out: the chat is too long)"],
            sys.stderr,
        )
    show([f"({line})" for line in answer_lines(result, peer_names(folder))], sys.stderr)
    return "".join(pieces)


def fitting(history: list[Message], bytes_max: int = HISTORY_BYTES_MAX) -> list[Message]:
    """Return a conversation without its oldest messages, but for the system's, if it is long. Raises
    UsageError: its last message alone is too long."""
    head = [each for each in history[:1] if each["role"] == "system"]
    rest = history[len(head) :]
    while len(rest) > 1 and _bytes(head + rest) > bytes_max:
        rest = rest[2:]
    if _bytes(head + rest) > bytes_max:
        raise UsageError(f"a message is longer than {bytes_max >> 10} KiB", "say it in fewer words")
    return head + rest


def _bytes(messages: list[Message]) -> int:
    return len(json.dumps(messages))
