"""A folder written by transformers' `save_pretrained`: config.json, and weights in safetensors.

`config.json` names the class (`architectures`), which must be one of transformers' own: code in the folder is
never run, and pickled weights are never read. The class determines the inputs and the loss. A model of a
different kind, or with a different loss, needs a user's own function that returns a `Task`. Nothing is
downloaded.
"""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from partition.capture.errors import CaptureRefused
from partition.capture.skeleton import skeleton
from partition.capture.task import Task, correct
from partition.capture.trees import own_loss

CONFIG = "config.json"
CONFIG_BYTES_MAX = 1 << 20
POOLING = "1_Pooling/config.json"
"""The file of sentence-transformers that says how a text's vector is pooled."""
_POOLING_NAMES = {"cls": "cls_token", "mean": "mean_tokens"}
LENGTH_MAX = 1024
"""Number of tokens in a sample, unless the user or the model says fewer."""
BATCH = 2
"""The batch size of the examples; only shapes and types matter."""
IGNORED = -100
"""The label that is ignored everywhere in transformers."""


def is_folder(reference: str) -> bool:
    """Return whether this is such a folder."""
    try:
        return (Path(reference).expanduser() / CONFIG).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def folder_task(
    folder: Path, *, values: bool = True, length: int = 0, fresh: bool = False, as_stored: bool = False
) -> Task:
    """Return the model in a folder, with examples of its inputs and its loss.

    Its values are converted to torch's default type, unless `as_stored` is set.

    Without `values` its weights are not read and take no memory: each stage would draw its own. With `fresh`
    the model has newly drawn weights, which are then to be replaced. `length` is the number of tokens in a
    sample; 0 for as many as the model accepts, but at most 1,024.

    Raises:
        CaptureRefused: transformers is not installed, or it does not know the folder's model; the text says
            what to do.
    """
    kind, model, config = _load(folder, values=values, fresh=fresh, as_stored=as_stored)
    model.train()
    wanted = next((make for word, make in _TASKS.items() if word in kind.__name__), None)
    if wanted is None:
        raise CaptureRefused(
            f"{folder}: {kind.__name__} has no loss that is known here "
            f"({', '.join(_TASKS)}). Write a function that returns a Task, and name it "
            "as PATH.py:FUNCTION"
        )
    task: Task = wanted(model, config, length)
    return task


def folder_encoder(folder: Path) -> tuple[nn.Module, str]:
    """Return the encoder in a folder, without the head for words or classes, and the pooling that makes one
    vector of a text: "cls" or "mean".

    Raises CaptureRefused if transformers is not installed, or the folder has no encoder.
    """
    _, model, _ = _load(folder)
    encoder: nn.Module = model.base_model
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None  # type: ignore[assignment]  # what BERT was trained with beside the words
    return encoder.eval(), _pooling(folder)


def is_encoder(folder: Path) -> bool:
    """Return whether a folder's model produces vectors rather than words. Raises CaptureRefused."""
    names = _read_config(folder).get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    return "ForMaskedLM" in name or (name.endswith("Model") and "LMHead" not in name)


def _pooling(folder: Path) -> str:
    """Return the pooling that sentence-transformers' file asks for; the mean if there is none."""
    path = folder / POOLING
    if not path.is_file():
        return "mean"
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise CaptureRefused(f"{path} cannot be read: {error}") from error
    found = found if isinstance(found, dict) else {}
    wanted = [name for name in ("cls", "mean") if found.get(f"pooling_mode_{_POOLING_NAMES[name]}") is True]
    if found.get("pooling_mode") in _POOLING_NAMES:
        wanted = [found["pooling_mode"]]
    others = [name for name, is_on in found.items() if name.startswith("pooling_mode_") and is_on is True]
    if len(wanted) != 1 or len(others) > 1:
        raise CaptureRefused(f"{path}: only the mean of all tokens and the first one's (cls) are known here")
    return str(wanted[0])


def _load(
    folder: Path, *, values: bool = True, fresh: bool = False, as_stored: bool = False
) -> tuple[Any, Any, Any]:
    """Return the class, the model and the configuration of a folder. Raises CaptureRefused."""
    named = _read_config(folder)
    transformers = _transformers()
    kind = _class_of(transformers, folder, named)
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if fresh:
            model = kind(config)
        elif values:
            _check_weights(folder)
            model = kind.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                dtype="auto" if as_stored else torch.get_default_dtype(),
            )
        else:
            with skeleton():
                model = kind(config)
    except CaptureRefused:
        raise
    except Exception as error:  # a library may raise anything for a folder
        told = " ".join(str(error).split())[:300]
        raise CaptureRefused(f"{folder}: {kind.__name__}: {type(error).__name__}: {told}") from error
    return kind, model, config


def _read_config(folder: Path) -> Mapping[str, Any]:
    try:
        with (folder / CONFIG).open("rb") as file:
            found = json.loads(file.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise CaptureRefused(f"{folder / CONFIG} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CaptureRefused(f"{folder / CONFIG} is no table")
    return found


def _transformers() -> Any:
    try:
        import transformers

        # the progress bar of a small model would be the only output
        transformers.utils.logging.disable_progress_bar()
    except ImportError as error:
        raise CaptureRefused(
            "a Hugging Face folder needs the package transformers, which is not installed: "
            f"{shlex.quote(sys.executable)} -m pip install transformers"
        ) from error
    return transformers


def _class_of(transformers: Any, folder: Path, config: Mapping[str, Any]) -> Any:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name:
        raise CaptureRefused(f"{folder / CONFIG} does not say under 'architectures' which model it is")
    # Only a public name of the library itself, not just anything that its modules contain.
    kind = getattr(transformers, name, None) if name.isidentifier() and name[0] != "_" else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise CaptureRefused(
            f"{folder}: transformers {transformers.__version__} has no model "
            f"'{name[:60]}', and code in a folder is not run"
        )
    return kind


def _check_weights(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.ckpt") for path in folder.glob(pattern))
        told = f"; {others[0]} is pickled, so it is not read" if others else ""
        raise CaptureRefused(
            f"{folder} has no weights in safetensors{told}. To use the model without "
            "its weights, set values = false (--set values=0)"
        )


# Kinds of models, by a word in the name of their class


def _text(model: nn.Module, config: Any, length: int, *, mask: bool = True) -> dict[str, Tensor]:
    places = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    most = int(next(filter(None, places), LENGTH_MAX))
    if type(model).__name__.startswith(COUNT_FROM_PADDING):
        most -= int(config.pad_token_id) + 1
    if length > most:
        raise CaptureRefused(f"length {length}: the model accepts at most {most} tokens")
    ids = torch.zeros((BATCH, length or min(most, LENGTH_MAX)), dtype=torch.int64)
    return {"input_ids": ids} | ({"attention_mask": torch.ones_like(ids)} if mask else {})


COUNT_FROM_PADDING = ("Roberta", "XLMRoberta", "Camembert")
"""Models whose positions begin after the position of the padding."""


def _causal(model: nn.Module, config: Any, length: int) -> Task:
    inputs = _text(model, config, length, mask=False)
    ids = inputs["input_ids"]
    return Task(model, inputs, {"y": ids}, loss=_token_loss, metrics={"tokens_correct": _tokens_correct})


def _masked(model: nn.Module, config: Any, length: int) -> Task:
    inputs = _text(model, config, length)
    labels = {"labels": inputs["input_ids"]}
    return Task(model, inputs, labels, loss=_token_loss, metrics={"tokens_correct": _tokens_correct})


def _classes(model: nn.Module, config: Any, length: int) -> Task:
    inputs = _text(model, config, length)
    if getattr(config, "pad_token_id", None) is None:
        # Such a model finds the end of a text by its padding.
        config.pad_token_id = 0
    labels = {"labels": torch.zeros(BATCH, dtype=torch.int64)}
    return Task(model, inputs, labels, loss=_class_loss, metrics={"correct": _classes_correct})


def _sequences(model: nn.Module, config: Any, length: int) -> Task:
    inputs = _text(model, config, length)
    ids = inputs["input_ids"]
    inputs["decoder_input_ids"] = ids
    return Task(model, inputs, {"labels": ids}, loss=own_loss)


def _images(model: nn.Module, config: Any, length: int) -> Task:  # noqa: ARG001 - as the others
    side = getattr(config, "image_size", None) or 224
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    pixels = torch.zeros(BATCH, getattr(config, "num_channels", 3), height, width)
    labels = (torch.zeros(BATCH, dtype=torch.int64),)
    return Task(
        model, {"pixel_values": pixels}, labels, loss=_class_loss, metrics={"correct": _classes_correct}
    )


_TASKS: dict[str, Callable[[nn.Module, Any, int], Task]] = {
    "ForCausalLM": _causal,
    "LMHeadModel": _causal,
    "ForMaskedLM": _masked,
    "ForTokenClassification": _masked,
    "ForSequenceClassification": _classes,
    "ForConditionalGeneration": _sequences,
    "ForImageClassification": _images,
}
"""A text's labels have its length: at each position the wanted token, or -100 if none is wanted."""


def _token_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy summed over the positions whose label counts, and the number of these
    positions."""
    loss = functional.cross_entropy(
        output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (labels != IGNORED).sum()


def _tokens_correct(output: Any, labels: Tensor) -> Tensor:
    hits: Tensor = output.logits.argmax(-1) == labels
    return hits.sum()


def _class_loss(output: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits, labels, reduction="sum")


def _classes_correct(output: Any, labels: Tensor) -> Tensor:
    return correct(output.logits, labels)
