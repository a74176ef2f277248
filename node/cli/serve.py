"""`peerloom serve MODEL`, `generate SERVICE "prompt"` and `services`: a model that is split over peers."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.client import ask, peer_names
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import show, show_json
from node.content.model_folder import is_model_folder
from node.errors import UsageError
from node.serving.sources import is_run
from node.text import counted

Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="T", help="0: always the likeliest token.")
]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Draw from this many tokens; 0: all.")]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="P", help="Draw from the likeliest tokens with this total share."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="P", help="Only tokens with this fraction of the likeliest's share."),
]


def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A captured FILE.peerloom, a model's folder, or a run's id."),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the service.")] = "",
    replicas: Annotated[
        int,
        typer.Option("--replicas", metavar="N", help="Number of nodes that hold each stage."),
    ] = 1,
    stages: Annotated[
        int,
        typer.Option("--stages", metavar="N", help="Number of stages; default: split only if necessary."),
    ] = 0,
    context_tokens: Annotated[
        int, typer.Option("--context", metavar="N", help="Maximum number of tokens of a session.")
    ] = 0,
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", metavar="FILE", help="The tokenizer.json, if MODEL is a file."),
    ] = "",
    peers: Annotated[
        str,
        typer.Option(
            "--peers", metavar="NAME,...", help="Peers that may hold it; invited: your listed peers."
        ),
    ] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Serve a model: publish it as a service that nodes of this swarm hold."""
    folder = find_data_dir(context, data_dir)
    wish = {"name": name, "stages": stages, "replicas": replicas, "context": context_tokens}
    if peers:
        wish |= {"peers": [each.strip() for each in peers.split(",") if each.strip()]}
    if tokenizer or is_model_folder(Path(model).expanduser()):
        wish |= {"text": str(Path(tokenizer or model).expanduser().absolute())}
    ask(folder, "status")  # check first, because capturing takes seconds and is useless without a node
    found: dict[str, Any]
    if is_run(model):
        found = ask(folder, "serve", {"model": model, "wish": wish}, seconds=None)
    else:
        # Imported here so that `generate` and `services` start faster.
        from node.cli.capture import captured_to_serve

        with captured_to_serve(model) as path:
            found = ask(folder, "serve", {"model": path, "wish": wish}, seconds=None)
    if as_json:
        show_json(found)
    else:
        show([*served_lines(found), *service_lines(found, peer_names(folder))])


def generate(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="SERVICE", help="The service's name or id.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    tokens_max: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Maximum length of the answer.")
    ] = 256,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Seed that makes draws repeatable.")] = "",
    stop: Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before this.")] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="FILE", help="The tokenizer.json of the service's model.")
    ] = "",
    exact: Annotated[
        bool, typer.Option("--exact", help="End rather than continue on another bit class.")
    ] = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Let a service continue a prompt, and show its answer as it arrives."""
    folder = find_data_dir(context, data_dir)
    text = sys.stdin.read() if prompt == "-" else prompt
    question: dict[str, Any] = {
        "prompt": text,
        "tokens_max": tokens_max,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": read_seed(seed),
        "stops": stop or [],
        "exact": exact,
    }
    pieces: list[Any] = []
    push: Callable[[Any], str] = str
    finish: Callable[[], str] = str
    if tokenizer:
        question["prompt"], push, finish = _by_tokenizer(tokenizer, text, stop or [])

    def on_event(event: Mapping[str, Any]) -> None:
        if "notice" in event:
            show([event["notice"]], sys.stderr)
            return
        piece = push(event["piece"])
        pieces.append(piece)
        if not as_json:
            write_piece(piece)

    found: dict[str, Any] = ask(
        folder, "generate", {"service": service, "question": question}, on_event, seconds=None
    )
    pieces.append(rest := finish())
    if as_json:
        show_json(found | {"text": "".join(pieces)})
        return
    write_piece(rest + "\n")
    show(answer_lines(found, peer_names(folder)), sys.stderr)


def services(
    context: typer.Context,
    stop: Annotated[
        str, typer.Option("--stop", metavar="SERVICE", help="End this service, which this node published.")
    ] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """List the services that answer now."""
    folder = find_data_dir(context, data_dir)
    if stop:
        document: dict[str, Any] = ask(folder, "services.stop", {"service": stop}, seconds=None)
        show_json(document) if as_json else show([f"{document['name']} is served no more"])
        return
    document = ask(folder, "services", seconds=None)
    if as_json:
        show_json(document)
        return
    names = peer_names(folder)
    lines = [line for row in document["services"] for line in service_lines(row, names)]
    show(lines or ["no service answers; begin one: `peerloom serve MODEL`"])


def served_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the lines that say how a model was split."""
    name, count = document["name"], len(document["stages"])
    if count == 1:
        return [f"{name} fits one peer, so it is not split (--stages N splits it)"]
    why = "as asked" if document.get("was_asked") else "for it fits no peer as a whole"
    return [f"{name} is split into {counted(count, 'stage')}, {why}"]


def service_lines(document: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return the lines of a service: the peers that answer for its stages, their load, and the figures of the
    latest answer."""
    head = f"{document['name']}  {document['service']}  up to {document['context']:,} tokens"
    if document.get("run"):
        head += f"  run {document['run'][:8]} at step {document['step']}"
    if document.get("is_restricted"):
        head += "  only at peers that its publisher named"
    lines = [head]
    for number, replicas in enumerate(document["stages"], 1):
        sessions = sum(each["sessions"] for each in replicas)
        who = ", ".join(_named(each["peer"], names) for each in replicas)
        lines.append(f"  stage {number}  {who or 'nobody'}  {counted(sessions, 'session')}{_cache(replicas)}")
    if document.get("first_seconds") is not None:
        rate = document.get("tokens_per_second")
        told = f", {rate:.1f} tokens a second" if rate is not None else ""
        lines.append(f"  the last answer here: the first token after {document['first_seconds']:.2f} s{told}")
    for number, replicas in enumerate(document["stages"], 1):
        classes = {each.get("bits", "") for each in replicas} - {""}  # unknown values are left out
        if len(classes) > 1:
            lines.append(f"  stage {number} has replicas of {len(classes)} bit classes: an answer that moves")
            lines.append("  between them may go on with another text")
    held = Counter(each["peer"] for replicas in document["stages"] for each in replicas)
    for peer, count in held.items():
        if count > 1:
            lines.append(f"  {_named(peer, names)} holds {count} stages until another node takes over")
    if any(len(replicas) < document["replicas"] for replicas in document["stages"]):
        wished = counted(document["replicas"], "replica is", "replicas are")
        lines.append(f"  {wished} wished for each stage, and not all are here")
    return lines


def _cache(replicas: Sequence[Mapping[str, Any]]) -> str:
    """Return the used share of the room for keys and values."""
    room = sum(each.get("tokens_max", 0) for each in replicas)
    if not room:
        return ""
    tokens = sum(each.get("tokens", 0) for each in replicas)
    return f"  cache {tokens:,} of {room:,} tokens"


def answer_lines(document: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return the lines that sum up an answer."""
    parts = [counted(document["tokens"], "token")]
    if document["first_seconds"] is not None:
        parts.append(f"the first after {document['first_seconds']:.2f} s")
    if document["tokens_per_second"] is not None:
        parts.append(f"{document['tokens_per_second']:.1f} a second")
    parts.append("by " + " -> ".join(_named(peer, names) for peer in document["route"]))
    lines = [", ".join(parts)]
    if document["moves"]:
        times = "once" if document["moves"] == 1 else f"{document['moves']} times"
        lines.append(f"a provider was lost {times}, and the answer went on elsewhere")
    if not document.get("exact", True):
        lines.append(
            "it went on with machines of another bit class: its text may differ from an undisturbed one"
        )
    return lines


def write_piece(text: str) -> None:
    """Write a piece of an answer, escaped, because another peer's model must not control the terminal."""
    from crypto.encoding import clean_text

    sys.stdout.write("".join(letter if letter in "\n\t" else clean_text(letter) for letter in text))
    sys.stdout.flush()


def _named(peer: str, names: Mapping[str, str]) -> str:
    return names.get(peer) or f"...{peer[-6:]}"


def read_seed(text: str) -> int | None:
    """Return the given seed, if any. Raises UsageError."""
    if not text:
        return None
    if not text.isdecimal():
        raise UsageError(f"--seed {text}: want a whole number")
    return int(text)


def _by_tokenizer(
    path: str, text: str, stops: Sequence[str]
) -> tuple[list[int], Callable[[Any], str], Callable[[], str]]:
    """Return a prompt's tokens, and the decoder of the answer's tokens. Raises UsageError."""
    from node.content.tokens import Tokens
    from partition.serve.text import TextStream

    known = Tokens(Path(path).expanduser())
    stream = TextStream(lambda ids: known.decode(list(ids)), stops)
    return known.encode(text, special=True).ids, stream.push, stream.finish
