"""Records for a language model as arrays of tokens: prompts with completions, chats, texts, labelled texts.

`node.content.record_columns` finds which columns hold what. Samples are cut and padded at their ends to one
length. The reading says how many were cut or padded, and which tokens the loss counts. The label of a token
is the token that follows it, or -100 if it does not count (as in all of transformers).
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from node.content.chat import ChatTemplate, Messages, Span, checked_messages, is_unclear
from node.content.columns import LabelColumn, Schema
from node.content.model_folder import ModelFolder
from node.content.reading import SAMPLES_SHOWN, SourceReading, shown, unclear
from node.content.record_columns import NOT_CONTENT, Form, RecordColumns, choose_columns
from node.content.records import Record, records_of, some_names
from node.content.tokens import Tell, Tokens
from node.errors import UsageError
from node.protocols.data_table import DataTable

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]

IGNORED = -100
WINDOW_STEP = 8
"""A window that the user did not set is a multiple of this."""
RECORDS_MAX = 1 << 26


@dataclass
class TokenSample:
    """Tokens, and for each whether it counts as part of an answer; or one label for all tokens."""

    ids: list[int]
    counted: list[bool] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    label: str = ""
    shown: str = ""


def read_records(
    path: Path,
    model: ModelFolder,
    known: Tokens,
    window: int,
    keys: DataTable,
    schema: Schema,
    reading: SourceReading,
    tell: Tell,
) -> Arrays:
    """Return the arrays for this kind of model from the records in a file. Raises UsageError, OSError."""
    records = records_of(path, keys, reading)
    first = next(records, None)
    if first is None:
        raise UsageError(f"{path}: no records")
    roles = choose_columns(path, list(first), first, model, keys, schema, reading)
    encoder = Encoder(path, model, known, keys, roles, is_new=not schema.needs_labels)
    table = _Table(path, encoder, keys, schema, reading)
    for number, record in enumerate(_chained(first, records), 1):
        if number > RECORDS_MAX:
            raise UsageError(f"{path}: more than {RECORDS_MAX:,} records")
        table.add(record, number)
        tell(f"{number:,} records")
    return table.finish(window)


def _chained(first: Record, rest: Iterator[Record]) -> Iterator[Record]:
    yield first
    yield from rest


# One record


class Encoder:
    """Converts records to samples for one model."""

    def __init__(
        self,
        path: Path,
        model: ModelFolder,
        known: Tokens,
        keys: DataTable,
        roles: RecordColumns,
        *,
        is_new: bool = False,
    ) -> None:
        self.is_new = is_new
        self.path, self.model, self.known, self.keys, self.roles = path, model, known, keys, roles
        self.before, self.behind = known.around()
        self.end = model.special.get("eos_token", "")
        self.end_id = known.id_of(self.end) if self.end else model.end_id
        self.template: ChatTemplate | None = None
        self.straddling = 0
        if roles.form == "chat":
            self.chat()
        if keys.loss and roles.form == "text":
            raise UsageError(
                f"{path}: loss does not apply to texts without prompts", "leave loss out of [data]"
            )
        if keys.loss == "last" and roles.form != "chat":
            raise UsageError(f"{path}: loss: there is one completion each", 'set loss = "answers" or "all"')

    def chat(self) -> ChatTemplate:
        """Return the chat template of the model's folder. Raises UsageError if it has none."""
        if self.template is None:
            if not self.model.template:
                raise UsageError(
                    f"{self.path}: holds messages, but {self.model.path} has no chat template",
                    "put chat_template.jinja into the model's folder, or give columns prompt and completion",
                )
            self.template = ChatTemplate(self.model.template, self.model.path, self.model.special)
        return self.template

    def sample(self, record: Record, number: int) -> TokenSample:
        """Return a record as tokens. Raises UsageError."""
        try:
            match self.roles.form:
                case "chat":
                    return self._chat(record, number)
                case "completion":
                    return self._completion(record, number)
                case "text":
                    return self._text(record)
                case "labelled":
                    return self._labelled(record)
        except ValueError as error:
            raise UsageError(f"{self.path}: record {number}: {error}") from None

    def _chat(self, record: Record, number: int) -> TokenSample:
        messages = checked_messages(_field(record, self.roles.inputs[0]))
        return self._rendered(messages, number)

    def _rendered(self, messages: Messages, number: int) -> TokenSample:
        counted = self.keys.loss or "answers"
        if self.is_new and messages[-1].get("role") != "assistant":
            text = self.chat().render(messages, prompts=True)
            return TokenSample(self.known.encode(text).ids, shown=shown(messages[-1].get("content")))
        try:
            text, spans = self.chat().answers(messages, counted)
        except ValueError as error:
            if not is_unclear(error):
                raise
            raise unclear(
                self.path,
                f"record {number}: {error}, so it is not clear which tokens are its answers",
                self.keys,
                *([] if counted == "last" else [{"loss": "last"}]),
                {"loss": "all"},
            ) from None
        found = self._counted(text, spans)
        answers = [message for message in messages if message.get("role") == "assistant"]
        told = answers[-1].get("content") if answers else ""
        found.shown = f"{len(messages)} messages; the last answer is {shown(told)}"
        return found

    def _completion(self, record: Record, number: int) -> TokenSample:
        prompt = self._joined(record)
        if not self.roles.target:  # without a target, the completion is to be predicted
            if isinstance(prompt, list):
                return self._rendered(checked_messages(prompt), number)
            if not isinstance(prompt, str):
                raise ValueError("the prompt is not text")
            return self._prompt(prompt)
        completion = _field(record, self.roles.target)
        if isinstance(completion, list):  # both are messages, as in trl
            return self._rendered([*checked_messages(prompt), *checked_messages(completion)], number)
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError("prompt and completion are not both texts")
        if self.model.kind == "sequences":
            return self._sequence(prompt, completion)
        whole = prompt + completion
        spans = [(0, len(whole))] if self.keys.loss == "all" else [(len(prompt), len(whole))]
        found = self._counted(whole, spans)
        self._end(found)
        found.shown = f"{shown(prompt)} -> {shown(completion)}"
        return found

    def _prompt(self, prompt: str) -> TokenSample:
        if self.model.kind == "sequences":
            return TokenSample(self.known.encode(prompt, special=True).ids, shown=shown(prompt))
        return TokenSample([*self.before, *self.known.encode(prompt).ids], shown=shown(prompt))

    def _joined(self, record: Record) -> Any:
        parts = [_field(record, name) for name in self.roles.inputs]
        if len(parts) == 1:
            return parts[0]
        if not all(part is None or isinstance(part, str) for part in parts):
            raise ValueError("a prompt is not text")
        return "\n".join(part for part in parts if part)

    def _text(self, record: Record) -> TokenSample:
        text = _field(record, self.roles.inputs[0])
        if not isinstance(text, str):
            raise ValueError(f"{self.roles.inputs[0]} is no text")
        found = self._counted(text, [(0, len(text))])
        self._end(found)
        found.shown = shown(" ".join(text.split()))
        return found

    def _labelled(self, record: Record) -> TokenSample:
        text = _field(record, self.roles.inputs[0])
        if not isinstance(text, str):
            raise ValueError(f"{self.roles.inputs[0]} is no text")
        ids = self.known.encode(text, special=True).ids
        label = ""
        if self.roles.target:
            found = record.get(self.roles.target)
            if found is None or isinstance(found, dict | list | float):
                raise ValueError(f"{self.roles.target} is no label: {shown(found)}")
            label = ("true" if found else "false") if isinstance(found, bool) else str(found)
        return TokenSample(ids, label=label, shown=f"{shown(' '.join(text.split()))} {label}".rstrip())

    def _sequence(self, prompt: str, completion: str) -> TokenSample:
        ids = self.known.encode(prompt, special=True).ids
        answer = self.known.encode(completion, special=True).ids
        return TokenSample(ids, answer=answer, shown=f"{shown(prompt)} -> {shown(completion)}")

    def _counted(self, text: str, spans: Sequence[Span]) -> TokenSample:
        """Return the tokens of a text. Tokens with a character in one of `spans` count."""
        encoded = self.known.encode(text)
        counted = []
        is_split = False
        at = 0
        for begin, end in encoded.offsets:
            while at < len(spans) and spans[at][1] <= begin:
                at += 1
            is_in = at < len(spans) and end > spans[at][0] and end > begin
            is_split = is_split or (is_in and begin < spans[at][0])
            counted.append(is_in)
        self.straddling += is_split
        if self.roles.form == "chat":  # here the template writes the special tokens
            return TokenSample(encoded.ids, counted)
        is_all = bool(spans) and spans[0][0] == 0
        return TokenSample([*self.before, *encoded.ids], [*[is_all] * len(self.before), *counted])

    def _end(self, sample: TokenSample) -> None:
        """Add the ending that the model should write after an answer."""
        if self.end_id >= 0 and (not sample.ids or sample.ids[-1] != self.end_id):
            self.known.check([self.end_id])
            sample.ids.append(self.end_id)
            sample.counted.append(True)


def _field(record: Record, name: str) -> Any:
    if name not in record:
        raise ValueError(f"there is no {shown(name)}")
    return record[name]


# All records


class _Table:
    """Collects samples as they arrive, then makes arrays of one length."""

    def __init__(
        self, path: Path, encoder: Encoder, keys: DataTable, schema: Schema, reading: SourceReading
    ) -> None:
        self._path, self._encoder, self._schema, self._reading = path, encoder, schema, reading
        self._model, self._known = encoder.model, encoder.known
        self._roles = encoder.roles
        self._ids, self._counted, self._answers = array("i"), array("b"), array("i")
        self._lengths, self._answer_lengths = array("i"), array("i")
        self._labels: list[str] = []
        self._shown: list[str] = []
        self._names: set[str] | None = None
        self._label_column = LabelColumn(path, self._roles.target, keys, schema)
        self._keys = keys

    def add(self, record: Record, number: int) -> None:
        """Add a record. Raises UsageError."""
        names = set(record)
        if self._names is None:
            self._names = names
        extra = sorted(names - self._names - set(self._keys.ignore or ()))
        if odd := [each for each in extra if each.strip().lower() not in NOT_CONTENT]:
            raise unclear(
                self._path,
                f"record {number} has {some_names(odd)}, which the first record does not have",
                self._keys,
                {"ignore": [*(self._keys.ignore or ()), *odd]},
            )
        sample = self._encoder.sample(record, number)
        self._ids.extend(sample.ids)
        self._lengths.append(len(sample.ids))
        if self._roles.form == "labelled":
            if self._roles.target:
                self._labels.append(sample.label)
        elif self._model.kind == "sequences":
            self._answers.extend(sample.answer)
            self._answer_lengths.append(len(sample.answer))
        else:
            self._counted.extend(sample.counted or [False] * len(sample.ids))
        if len(self._shown) < SAMPLES_SHOWN:
            self._shown.append(sample.shown)

    def finish(self, window: int) -> Arrays:
        """Return arrays with one window per sample. Raises UsageError if nothing is left to learn."""
        is_causal = self._roles.form != "labelled" and self._model.kind == "causal"
        longest = max(*self._lengths, *self._answer_lengths, 2) - is_causal
        if not window:
            window = min(self._model.length_max, -(-longest // WINDOW_STEP) * WINDOW_STEP)
        reading = self._reading
        reading.form += f", {_FORMS[self._roles.form]}, tokens of {self._known.path} in windows of {window}"
        reading.window, reading.vocabulary = window, self._known.count
        reading.records = self._roles.form
        reading.samples = reading.samples or self._shown
        found = self._causal(window) if is_causal else self._both(window)
        self._state_cuts(window + is_causal)
        return found

    def _state_cuts(self, most: int) -> None:
        cut = sum(length > most for length in (*self._lengths, *self._answer_lengths))
        whole = len(self._lengths)
        notes = self._reading.notes
        notes.append(
            f"{cut:,} of {whole:,} records are longer than {most:,} tokens, and are cut at the end"
            if cut
            else f"no record is longer than {most:,} tokens, so none is cut"
        )
        pad = self._pad_id()
        token = shown(self._known.token_of(pad))
        notes.append(f"shorter ones are padded at the end with {token} ({pad}), which does not count")
        if self._encoder.straddling:
            notes.append(
                f"in {self._encoder.straddling:,} records a token spans prompt and answer: it counts"
            )
        if self._encoder.template is not None and self._encoder.template.has_today:
            notes.append("the chat template writes today's date into each chat")

    def _pad_id(self) -> int:
        if self._roles.form == "labelled":  # such a model finds the end of a text by its padding
            return max(0, self._model.pad_id)
        named = self._model.special.get("pad_token", "")
        found = self._known.id_of(named) if named else self._model.pad_id
        return found if found >= 0 else max(0, self._model.end_id)

    def _causal(self, window: int) -> Arrays:
        rows = len(self._lengths)
        x = np.full((rows, window), self._pad_id(), np.int32)
        y = np.full((rows, window), IGNORED, np.int32)
        ids, counted = np.frombuffer(self._ids, np.int32), np.frombuffer(self._counted, np.int8)
        place = 0
        for row, length in enumerate(self._lengths):
            kept = min(length, window + 1)
            sample = ids[place : place + kept]
            x[row, : max(0, kept - 1)] = sample[:-1]
            y[row, : max(0, kept - 1)] = np.where(counted[place + 1 : place + kept], sample[1:], IGNORED)
            place += length
        empty = (y == IGNORED).all(axis=1)
        if self._encoder.is_new:
            if (most := max(self._lengths)) > window + 1:
                raise UsageError(
                    f"{self._path}: a prompt has {most:,} tokens, but the model takes at most {window:,}"
                )
            return self._new(window)
        if empty.all():
            raise UsageError(
                f"{self._path}: no record has an answer within {window:,} tokens",
                'set a longer train.window, or loss = "all" in [data]',
            )
        if empty.any():
            self._reading.skipped.append(
                f"{int(empty.sum()):,} records without an answer within {window:,} tokens"
            )
            x, y = x[~empty], y[~empty]
        self._reading.label = self._counted_text(int((y != IGNORED).sum()), int(sum(self._lengths)))
        return {"x": x, "y": y}

    def _new(self, window: int) -> Arrays:
        """Return samples to be predicted: their tokens, the number of tokens, and which are answers."""
        rows = len(self._lengths)
        found: Arrays = {
            "ids": np.full((rows, window + 1), self._pad_id(), np.int32),
            "counted": np.zeros((rows, window + 1), np.int8),
            "lengths": np.frombuffer(self._lengths, np.int32),
        }
        place = 0
        for row, length in enumerate(self._lengths):
            for name, flat in (("ids", self._ids), ("counted", self._counted)):
                found[name][row, :length] = flat[place : place + length]
            place += length
        return found

    def _counted_text(self, counted: int, tokens: int) -> str:
        form, loss = self._roles.form, self._keys.loss or "answers"
        what = "all tokens"
        if loss != "all" and form == "completion":
            what = "the completions' tokens, not the prompts'"
        if loss != "all" and form == "chat":
            what = (
                "the tokens of the last answer" if loss == "last" else "the tokens of the assistant's answers"
            )
        end = ""
        if form != "chat":
            encoder = self._encoder
            end = (
                f", and the end {shown(encoder.end or self._known.token_of(encoder.end_id))}"
                if encoder.end_id >= 0
                else "; no end token is known"
            )
        return f"the same tokens, shifted by one; the loss counts {what}{end}: {counted:,} of {tokens:,}"

    def _both(self, window: int) -> Arrays:
        """Return arrays for models that see a whole text in one pass: classifiers and encoder-decoders."""
        pad = self._pad_id()
        inputs, mask = self._padded(self._ids, self._lengths, window, pad)
        found = {"input_ids": inputs, "attention_mask": mask}
        if self._roles.form == "labelled":
            if self._roles.target:
                found["labels"] = self._label_numbers()
            return found
        answers, counts = self._padded(self._answers, self._answer_lengths, window, pad)
        start = self._model.start_id if self._model.start_id >= 0 else pad
        decoder = np.full_like(answers, pad)
        decoder[:, 0], decoder[:, 1:] = start, answers[:, :-1]
        found["decoder_input_ids"] = decoder
        found["labels"] = np.where(counts > 0, answers, IGNORED)
        self._reading.label = (
            f"the tokens of {shown(self._roles.target)}: {int(counts.sum()):,}; the decoder begins with"
            f" {shown(self._known.token_of(start))} ({start})"
        )
        return found

    def _padded(
        self, flat: "array[int]", lengths: "array[int]", window: int, pad: int
    ) -> tuple[Array, Array]:
        found = np.full((len(lengths), window), pad, np.int32)
        mask = np.zeros((len(lengths), window), np.int8)
        ids = np.frombuffer(flat, np.int32) if flat else np.empty(0, np.int32)
        behind = self._encoder.behind
        place = 0
        for row, length in enumerate(lengths):
            kept = min(length, window)
            found[row, :kept] = ids[place : place + kept]
            # A cut text still gets the ending that the tokenizer puts after texts.
            if length > window and 0 < len(behind) < window:
                found[row, window - len(behind) :] = behind
            mask[row, :kept] = 1
            place += length
        return found, mask

    def _label_numbers(self) -> Array:
        """Return the numbers of the labels, according to the class names in the model's folder."""
        schema, model = self._schema, self._model
        different = set(self._labels)
        if not schema.words and not schema.label_kind and not self._keys.classes:
            numbers = {str(number) for number in range(model.classes)}
            if model.words and different <= set(model.words) and not different <= numbers:
                schema.words[:] = model.words
                schema.order = "words, numbered as in the model's folder"
            elif different <= numbers:
                schema.words[:] = model.words or [str(number) for number in range(model.classes)]
                schema.order = "numbers of classes; their words are the model's"
                order = {str(number): word for number, word in enumerate(schema.words)}
                self._labels = [order[each] for each in self._labels]
            elif model.words and not all(map(str.isdecimal, different)):
                raise unclear(
                    self._path,
                    f"it has labels {some_names(sorted(different))}, the model {some_names(model.words)}",
                    self._keys,
                    {"classes": sorted(different)},
                )
        elif schema.words and different <= {str(n) for n in range(len(schema.words))} - set(schema.words):
            self._labels = [schema.words[int(each)] for each in self._labels]
        self._label_column.add(self._labels)
        found = self._label_column.finish()
        count = len(schema.words) or int(found.max()) + 1
        if found.dtype.kind == "f" or count > model.classes:
            told = f"{count} classes" if found.dtype.kind != "f" else "amounts"
            raise UsageError(
                f"{self._path}: the label {shown(self._roles.target)} has {told}, but the model in"
                f" {model.path} distinguishes {model.classes}",
                f"make and save the model with num_labels={count}",
            )
        schema.label, schema.why = (
            self._roles.target,
            ("by the key `label`" if self._keys.label else "the column with that name"),
        )
        return found


_FORMS: dict[Form, str] = {
    "chat": "messages by the folder's chat template",
    "completion": "prompt and completion",
    "text": "a text each",
    "labelled": "one text each, with a label",
}
