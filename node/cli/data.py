"""`peerloom data show SOURCE`: show how a source would be read, before training on it.

It shows the reading that `train` prints first. The flags are keys of `[data]` in RUN.toml.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.options import AsJson, CommandGroup
from node.cli.render import progress, show, show_json
from node.errors import UsageError

app = typer.Typer(cls=CommandGroup, no_args_is_help=False, rich_markup_mode=None)

Names = list[str] | None


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Show how data would be read."""
    if context.invoked_subcommand is None:
        raise UsageError("data: want a command", "`peerloom data show SOURCE`")


@app.command("show")
def show_source(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A table, arrays, a folder of images; or RUN.toml.")
    ],
    label: Annotated[str, typer.Option("--label", metavar="COL", help="The column of labels.")] = "",
    feature: Annotated[
        Names, typer.Option("--feature", "--features", metavar="COL", help="A column to learn from.")
    ] = None,
    ignore: Annotated[Names, typer.Option("--ignore", metavar="COL", help="A column to leave out.")] = None,
    separator: Annotated[str, typer.Option("--separator", metavar="C", help="Between fields.")] = "",
    decimal: Annotated[str, typer.Option("--decimal", metavar=".|,", help="The mark of decimals.")] = "",
    encoding: Annotated[str, typer.Option("--encoding", metavar="NAME", help="Such as cp1252.")] = "",
    header: Annotated[
        bool | None, typer.Option("--header/--no-header", help="Whether the first line holds names.")
    ] = None,
    classes: Annotated[
        str, typer.Option("--classes", metavar="words|numbers|amounts|A,B", help="What labels are.")
    ] = "",
    channels: Annotated[
        str, typer.Option("--channels", metavar="first|last", help="Position of image channels in arrays.")
    ] = "",
    prompt: Annotated[
        Names, typer.Option("--prompt", metavar="COL", help="The column of prompts in records.")
    ] = None,
    completion: Annotated[str, typer.Option("--completion", metavar="COL", help="The completions.")] = "",
    messages: Annotated[str, typer.Option("--messages", metavar="COL", help="The column of chats.")] = "",
    text: Annotated[str, typer.Option("--text", metavar="COL", help="The column of texts.")] = "",
    loss: Annotated[
        str, typer.Option("--loss", metavar="answers|last|all", help="Which tokens the loss counts.")
    ] = "",
    form: Annotated[
        str, typer.Option("--form", metavar="bytes|table", help="Form of a file that may be either.")
    ] = "",
    model: Annotated[
        str, typer.Option("--model", metavar="FOLDER", help="The Hugging Face folder to train.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show how a source is read: its form, label, classes, shapes and first samples."""
    given: dict[str, Any] = {
        "label": label,
        "features": feature or (),
        "ignore": ignore,
        "separator": separator.replace("\\t", "\t"),
        "decimal": decimal,
        "encoding": encoding,
        "header": header,
        "classes": _read_classes(classes),
        "channels": channels,
        "prompt": prompt[0] if prompt and len(prompt) == 1 else prompt,
        "completion": completion,
        "messages": messages,
        "text": text,
        "loss": loss,
        "form": form,
    }
    keys = {name: value for name, value in given.items() if value not in ("", (), [], None)}
    _show_reading(read_source(source, keys, model), as_json=as_json)


def _read_classes(text: str) -> str | list[str]:
    """Return the kind of labels that a flag gives, or the classes that it lists."""
    if text in ("words", "numbers", "amounts"):
        return text
    return [name for name in text.split(",") if name]


def _show_reading(reading: Any, *, as_json: bool) -> None:
    from node.content.reading import reading_document

    if as_json:
        show_json(reading_document(reading) or {})
    else:
        show(reading.lines())


def read_source(source: str, keys: dict[str, Any], model: str = "") -> Any:
    """Read a source for a model, or the data of a RUN.toml, with additional keys of `[data]`. Raises
    UsageError."""
    import msgspec

    from node.cli.capture import loading, prepare_data, reading_as_is
    from node.cli.temporary import command_folder
    from node.protocols.data_table import DataTable
    from node.protocols.run_file import RunFile
    from node.toml import load

    base, name = Path(), "data show"
    run_file = RunFile(model or "mlp", source)
    if source.endswith(".toml"):
        base, name = Path(source).expanduser().parent, source
        run_file = load(Path(source).expanduser(), RunFile)
        run_file = msgspec.structs.replace(run_file, model=model or run_file.model)
    whole = msgspec.to_builtins(run_file.data_keys) | keys
    try:
        table = msgspec.convert({key: value for key, value in whole.items() if value is not None}, DataTable)
    except msgspec.ValidationError as error:
        raise UsageError(f"data show: {error}") from None
    run_file = msgspec.structs.replace(run_file, data=table)
    with command_folder() as folder:
        reading = prepare_data(run_file, base, folder, name, progress)
        if reading is None:
            return reading_as_is(run_file, base, loading(run_file, base, progress))
        return reading
