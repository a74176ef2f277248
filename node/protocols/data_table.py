"""`[data]` of RUN.toml: the source of a run's samples, and keys that settle ambiguous readings.

docs/data.md explains each key. A source that can be read in two ways is refused. The error shows the line
that decides between them, which `DataTable.line` writes.
"""

import json
from typing import Annotated, Any, Literal

import msgspec

COLUMNS_MAX = 65_536
"""Maximum number of columns of a table; tables of genes have 60,000."""
_TEXT_MAX = 4_096

Name = Annotated[str, msgspec.Meta(max_length=_TEXT_MAX)]
Names = Annotated[tuple[Name, ...], msgspec.Meta(max_length=COLUMNS_MAX)]
ClassRule = Literal["words", "numbers", "amounts"]


class DataTable(msgspec.Struct, frozen=True):
    """The source of samples, and the keys that decide how to read a source that would otherwise be refused as
    unclear.

    `source` is the value of `data = "..."`. `label` is the label column; `features` are the columns to learn
    from, and `ignore` those left out (`[]`: none). `separator`, `decimal`, `encoding` and `header` (whether
    the first line holds names) describe the form of a table. `classes` either lists the labels' words in the
    order of their numbers, or states that each label is a word, the number of its class, or an amount.
    `channels` gives the axis of pictures' channels.

    For the records of a language model, `prompt` and `completion`, `messages`, or `text` name the columns.
    `loss` selects the tokens to learn: those of all answers, of the last answer, or all. `form` decides
    whether a file is a table, or a text whose bytes are learnt.
    """

    source: Annotated[str, msgspec.Meta(min_length=1, max_length=_TEXT_MAX)]
    label: Name = ""
    features: Names = ()
    ignore: Names | None = None
    separator: Annotated[str, msgspec.Meta(max_length=1)] = ""
    decimal: Literal["", ".", ","] = ""
    encoding: Annotated[str, msgspec.Meta(max_length=40)] = ""
    header: bool | None = None
    classes: ClassRule | Names = ()
    channels: Literal["", "first", "last"] = ""
    prompt: Name | Names = ""
    completion: Name = ""
    messages: Name = ""
    text: Name = ""
    loss: Literal["", "answers", "last", "all"] = ""
    form: Literal["", "bytes", "table"] = ""

    def line(self, **more: Any) -> str:
        """Return the line of RUN.toml with these keys, and with `more`."""
        given = {
            name: getattr(self, name)
            for name in self.__struct_fields__
            if getattr(self, name) not in ("", (), None) or (name == "ignore" and self.ignore is not None)
        } | more
        return "data = { " + ", ".join(f"{name} = {_toml(value)}" for name, value in given.items()) + " }"

    def flags(self, **more: Any) -> str:
        """Return the flags of `data show` that are equivalent to `more`."""
        words = []
        for name, value in more.items():
            if isinstance(value, bool):
                words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, list | tuple):
                words += [f"--{name} {each}" for each in value]
            else:
                words.append(f"--{name} {value}")
        return " ".join(words)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
