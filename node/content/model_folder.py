"""Facts about the model and the tokenizer in a Hugging Face folder, read from its JSON files, without torch.

The facts are the kind of model, its vocabulary and context length, and the names of its classes.
`partition.capture` loads the model itself. Both recognize the kind of model by the same words in the class's
name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from node.errors import UsageError

FolderKind = Literal["", "causal", "masked", "classes", "sequences", "images"]

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
_SPECIAL_TOKENS = "special_tokens_map.json"
READ_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, _SPECIAL_TOKENS)
"""The files of a folder that are needed to turn text into tokens."""
FOLDER_FILES = (
    *READ_FILES, "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "image_processor_config.json",
)  # fmt: skip
"""The files that `save_pretrained` of models, tokenizers and processors writes in addition to the weights."""
CONFIG_BYTES_MAX = 1 << 20
TOKENIZER_CONFIG_BYTES_MAX = 1 << 24
"""Maximum size of a tokenizer_config.json: enough for 256,000 added tokens of a few lines each."""
LENGTH_MAX = 1024
"""Maximum number of tokens in a sample, unless the user or the model sets a lower one; same as in
`partition.capture`."""
_CLASSES_USUAL = 2
"""Number of classes that transformers assumes if a configuration does not give it."""
_KINDS: tuple[tuple[str, FolderKind], ...] = (
    ("ForCausalLM", "causal"),
    ("LMHeadModel", "causal"),
    ("ForMaskedLM", "masked"),
    ("ForTokenClassification", "masked"),
    ("ForSequenceClassification", "classes"),
    ("ForConditionalGeneration", "sequences"),
    ("ForImageClassification", "images"),
)
_COUNT_FROM_PADDING = ("Roberta", "XLMRoberta", "Camembert")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ModelFolder:
    """The facts about a folder. `words` are the names of the classes in the order of their numbers; empty if
    the folder gives only their count. `special` are the special tokens by name. Ids that the folder does not
    give are -1."""

    path: Path
    kind: FolderKind
    vocabulary: int
    length_max: int
    classes: int
    words: tuple[str, ...]
    pad_id: int
    end_id: int
    start_id: int
    special: Mapping[str, str] = field(default_factory=dict)
    template: str = ""
    is_own_length: bool = True
    """Whether the model has a context length."""

    @property
    def tokenizer(self) -> Path:
        return self.path / TOKENIZER

    @property
    def is_of_text(self) -> bool:
        return self.kind not in ("", "images")


def is_model_folder(path: Path) -> bool:
    """Return whether this folder has a configuration."""
    try:
        return (path / CONFIG).is_file()
    except (OSError, ValueError):
        return False


def read_model_folder(path: Path) -> ModelFolder:
    """Return a folder's facts. Raises UsageError: its files cannot be read."""
    config = read_table(path / CONFIG, CONFIG_BYTES_MAX)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    kind: FolderKind = next((kind for word, kind in _KINDS if word in name), "")
    text = config.get("text_config")
    inner = config | text if isinstance(text, dict) else config
    most = next(
        (
            _number(inner, key)
            for key in ("max_position_embeddings", "n_positions")
            if _number(inner, key) > 0
        ),
        0,
    )
    if most and name.startswith(_COUNT_FROM_PADDING):
        most -= max(0, _number(inner, "pad_token_id")) + 1
    words = _words(config)
    count = config.get("num_labels")
    special, template = tokenizer_facts(path)
    return ModelFolder(
        path,
        kind,
        max(0, _number(inner, "vocab_size")),
        most or LENGTH_MAX,
        len(words) or (count if isinstance(count, int) and count > 0 else _CLASSES_USUAL),
        () if all(word == f"LABEL_{number}" for number, word in enumerate(words)) else words,
        _number(inner, "pad_token_id"),
        _number(inner, "eos_token_id"),
        _number(inner, "decoder_start_token_id"),
        special,
        template,
        bool(most),
    )


def read_table(path: Path, bytes_max: int) -> dict[str, Any]:
    """Return a JSON file that holds an object. Raises UsageError."""
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise UsageError(f"{path}: more than {bytes_max >> 20} MiB")
        found = json.loads(data)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not readable JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: is not a JSON object")
    return found


def _number(config: Mapping[str, Any], key: str) -> int:
    """Return a whole number, the first one if the value is a list, or -1 if there is none."""
    found = config.get(key)
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) and not isinstance(found, bool) else -1


def _words(config: Mapping[str, Any]) -> tuple[str, ...]:
    known = config.get("id2label")
    if not isinstance(known, dict):
        return ()
    try:
        by_number = {int(number): str(word) for number, word in known.items()}
    except ValueError:
        return ()
    if sorted(by_number) != list(range(len(by_number))):
        return ()
    return tuple(by_number[number] for number in range(len(by_number)))


def tokenizer_facts(path: Path) -> tuple[dict[str, str], str]:
    """Return the special tokens by name, and the chat template."""
    config: dict[str, Any] = {}
    for name in (_SPECIAL_TOKENS, TOKENIZER_CONFIG):
        if (path / name).is_file():
            config |= read_table(path / name, TOKENIZER_CONFIG_BYTES_MAX)
    special = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[name] = token
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    try:
        if (path / TEMPLATE).is_file():
            with (path / TEMPLATE).open("rb") as file:
                template = file.read(CONFIG_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path / TEMPLATE}: cannot be read: {error}") from None
    return special, template if isinstance(template, str) else ""
