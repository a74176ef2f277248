"""`peerloom chat SERVICE`: a conversation with a served model, using the chat template of its folder.

The conversation is kept only in this process, and is sent to the node with each message; `/save` writes it to
a file. Ctrl-C stops the current answer. The part of the answer that has arrived stays in the conversation, as
it does if an answer breaks off. The next line, or `/retry`, continues. Ctrl-D, or the end of the input, ends
the chat.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.client import ask, peer_names, request
from node.cli.options import DataDir, find_data_dir
from node.cli.render import show
from node.cli.serve import MinP, Temperature, TopK, TopP, answer_lines, read_seed, service_lines, write_piece
from node.errors import EXIT_DONE, PeerloomError, UsageError
from node.suggest import did_you_mean

HISTORY_BYTES_MAX = 1 << 20
"""Maximum number of bytes of messages in a question, below the limit of the control channel. Above it, the
oldest messages are left out."""
PROMPT = "> "
HELP = (
    "/retry           answer the last message again",
    "/system [TEXT]   set instructions for the model; without TEXT remove them",
    "/models          the services that answer now, and the peers that hold them",
    "/clear           forget the conversation",
    "/save FILE       write the conversation to a file, as JSON",
    "/quit            end (so does Ctrl-D)",
    "//...            a message that begins with /",
)

Message = dict[str, str]


def chat(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="Its name, or its id.")],
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="Instructions for the model.")] = "",
    tokens_max: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Maximum length of an answer.")
    ] = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Seed that makes draws repeatable.")] = "",
    data_dir: DataDir = "",
) -> None:
    """Talk with a served model; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends."""
    folder = find_data_dir(context, data_dir)
    found: dict[str, Any] = ask(folder, "services.text", {"service": service}, seconds=None)
    name = found["name"]
    if not found["has_template"]:
        raise UsageError(
            f"{name} has no chat template to turn a conversation into text",
            "use `peerloom generate`, which continues plain text",
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
        show([f"{name}: Ctrl-C stops an answer, Ctrl-D ends, /help lists commands"], sys.stderr)
    talk = _Talk(folder, found["service"], settings, system)
    for said in _said(is_terminal=is_terminal):
        if not talk.take(said):
            break
    if talk.exit_code and not is_terminal:
        raise typer.Exit(talk.exit_code)  # with piped input, only the exit code reports a failure


@dataclass
class _Talk:
    """A conversation. `turns` are messages and answers, alternating. A message without any answer is not sent
    again."""

    folder: Path
    service: str
    settings: dict[str, Any]
    system: str
    turns: list[Message] = field(default_factory=list)
    exit_code: int = EXIT_DONE
    """The exit code of the newest answer: 0 if it succeeded."""

    def take(self, said: str) -> bool:
        """Handle a line that the user typed; return whether the chat continues."""
        if not said.startswith("/") or said.startswith("//"):
            self._ask(said.removeprefix("/") if said.startswith("//") else said)
            return True
        name, _, rest = said[1:].partition(" ")
        if name in ("quit", "exit"):
            return False
        commands: dict[str, Callable[[str], object]] = {
            "help": lambda _: show([*HELP], sys.stderr),
            "retry": self._retry,
            "system": self._tell,
            "models": self._list,
            "clear": self._clear,
            "save": self._save,
        }
        if name in commands:
            self._attempt(lambda: commands[name](rest.strip()))
        else:
            near = did_you_mean(name, [*commands, "quit"])
            show([f"/{name[:40]}: no such command{near}; /help lists them"], sys.stderr)
        return True

    def _attempt(self, work: Callable[[], object]) -> None:
        """Run an action; show its error, if any."""
        self.exit_code = EXIT_DONE
        try:
            work()
        except PeerloomError as error:
            self.exit_code = error.exit_code
            show([f"error: {error.what}", *([f"  do: {error.do}"] if error.do else [])], sys.stderr)

    def _ask(self, said: str) -> None:
        self.turns += [{"role": "user", "content": said}, {"role": "assistant", "content": ""}]
        self._attempt(self._answer)

    def _retry(self, _: str) -> None:
        if not self.turns:
            raise UsageError("there is no message to answer again")
        self.turns[-1] = {"role": "assistant", "content": ""}
        self._answer()

    def _tell(self, text: str) -> None:
        self.system = text
        show(
            [f"(instructions for the model: {text})" if text else "(no instructions for the model)"],
            sys.stderr,
        )

    def _list(self, _: str) -> None:
        names = peer_names(self.folder)
        rows = ask(self.folder, "services", seconds=None)["services"]
        show([line for row in rows for line in service_lines(row, names)], sys.stderr)

    def _clear(self, _: str) -> None:
        self.turns.clear()
        show(["(forgotten)"], sys.stderr)

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs the name of a file")
        path = Path(name).expanduser()
        data = json.dumps(self._messages(), ensure_ascii=False, indent=1)
        try:
            # The file is readable only by this user, and an existing file is not overwritten.
            with open(
                path, "x", encoding="utf-8", opener=lambda at, flags: os.open(at, flags, 0o600)
            ) as file:
                file.write(data + "\n")
        except OSError as error:
            raise UsageError(f"{name}: {(error.strerror or str(error)).lower()}") from None
        show([f"({len(self.turns) // 2} messages with their answers are in {path})"], sys.stderr)

    def _messages(self) -> list[Message]:
        """Return the messages to send: the newest one, and the answered ones before it."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        pairs = [self.turns[at : at + 2] for at in range(0, len(self.turns), 2)]
        return head + [each for pair in pairs if pair[1]["content"] for each in pair]

    def _answer(self) -> None:
        """Show the answer to the newest message as it arrives, and keep it, even if only a part arrives.
        Raises PeerloomError."""
        pieces: list[str] = []
        result: dict[str, Any] = {}
        messages = [*self._messages(), self.turns[-2]]
        question = self.settings | {"messages": fitting(messages)}
        replies = request(self.folder, "generate", {"service": self.service, "question": question})
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
            return
        except PeerloomError:
            if pieces:
                write_piece("\n")
            raise
        finally:
            self.turns[-1]["content"] = "".join(pieces)
        write_piece("\n")
        if result.get("forgotten"):
            show(
                [f"({result['forgotten']} of the oldest messages were left out: the chat is too long)"],
                sys.stderr,
            )
        show([f"({line})" for line in answer_lines(result, peer_names(self.folder))], sys.stderr)


def _said(*, is_terminal: bool) -> Iterator[str]:
    """Yield the lines that a person types, until the input ends."""
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


def fitting(history: list[Message], bytes_max: int = HISTORY_BYTES_MAX) -> list[Message]:
    """Return a conversation that fits the limit, without its oldest messages but with the system message.
    Raises UsageError if the newest message alone is too long."""
    head = [each for each in history[:1] if each["role"] == "system"]
    rest = history[len(head) :]
    sizes = [_bytes([each]) for each in rest]
    size, first = _bytes(head) + sum(sizes), 0
    while size > bytes_max and len(rest) - first > 1:
        size -= sum(sizes[first : first + 2])
        first += 2
    if size > bytes_max:
        raise UsageError(f"a message is longer than {bytes_max >> 10} KiB", "shorten it")
    return head + rest[first:]


def _bytes(messages: list[Message]) -> int:
    return len(json.dumps(messages))
