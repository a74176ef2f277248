"""Metrics of predictions by name, for classes, tokens and numbers. Uses only numpy, and nothing random."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

IGNORED = -100
"""The label of positions that do not count, as in torch's cross entropy."""
CLASSES_MAX = 1_000
"""Maximum number of classes for which a confusion matrix is made."""
TOP = 5


@dataclass(frozen=True)
class Judged:
    """Metrics by name, the predicted classes or numbers, and for up to 1,000 classes the confusion matrix
    (row: truth, column: prediction)."""

    metrics: dict[str, float]
    predicted: Array
    confusion: Array | None = None


def classes_last(outputs: Array, truth: Array) -> Array | None:
    """Return outputs with the classes on the last axis, as (..., C) for truth (...); None if the outputs are
    not class scores."""
    if truth.dtype.kind not in "iub" or outputs.ndim != truth.ndim + 1:
        return None
    if outputs.shape[:-1] == truth.shape:
        return outputs
    if outputs.shape[:1] + outputs.shape[2:] == truth.shape:
        return np.moveaxis(outputs, 1, -1)
    return None


def predicted_of(outputs: Array, truth: Array | None) -> Array:
    """Return the predictions in outputs: the classes with the highest scores, or the numbers themselves."""
    scores = classes_last(outputs, truth) if truth is not None else None
    if scores is None and truth is None and outputs.ndim == 2 and outputs.shape[1] > 1:
        scores = outputs
    return outputs if scores is None else scores.argmax(-1)


def judge(outputs: Array, truth: Array) -> Judged:
    """Compare outputs with the ground truth, sample by sample.

    For classes: accuracy, top-5 (if there are more than 5), perplexity, and precision, recall and F1 as means
    over the classes in the truth. For numbers: mean squared and absolute error and R2.
    """
    scores = classes_last(outputs, truth)
    if scores is None:
        return _judge_numbers(outputs, truth)
    count = scores.shape[-1]
    flat, labels = scores.reshape(-1, count).astype(np.float64), truth.reshape(-1).astype(np.int64)
    kept = (labels != IGNORED) & (labels >= 0) & (labels < count)
    flat, labels = flat[kept], labels[kept]
    predicted = scores.argmax(-1)
    if not len(labels):
        return Judged({}, predicted)
    best = flat.argmax(1)
    highest = flat.max(1, keepdims=True)
    logs = flat - highest - np.log(np.exp(flat - highest).sum(1, keepdims=True))
    loss = float(-logs[np.arange(len(labels)), labels].mean())
    metrics = {
        "samples": float(len(labels)),
        "accuracy": float((best == labels).mean()),
        "cross_entropy": loss,
        "perplexity": float(np.exp(min(loss, 700.0))),
    }
    if count > TOP:
        above = (flat > flat[np.arange(len(labels)), labels][:, None]).sum(1)
        metrics[f"top_{TOP}"] = float((above < TOP).mean())
    found, wanted = np.bincount(best, minlength=count), np.bincount(labels, minlength=count)
    right = np.bincount(labels[best == labels], minlength=count)
    precision, recall = right / np.maximum(1, found), right / np.maximum(1, wanted)
    f1 = 2 * right / np.maximum(1, found + wanted)
    for name, values in (("precision", precision), ("recall", recall), ("f1", f1)):
        metrics[name] = float(values[wanted > 0].mean())
    confusion = None
    if count <= CLASSES_MAX:
        confusion = np.bincount(labels * count + best, minlength=count * count).reshape(count, count)
    return Judged(metrics, predicted, confusion)


def _judge_numbers(outputs: Array, truth: Array) -> Judged:
    if outputs.size != truth.size:
        return Judged({}, outputs)
    found, wanted = outputs.reshape(-1).astype(np.float64), truth.reshape(-1).astype(np.float64)
    errors = found - wanted
    spread = float(((wanted - wanted.mean()) ** 2).sum())
    metrics = {
        "samples": float(len(truth)),
        "mean_squared_error": float((errors**2).mean()),
        "mean_absolute_error": float(np.abs(errors).mean()),
    }
    if spread:
        metrics["r2"] = 1 - float((errors**2).sum()) / spread
    return Judged(metrics, outputs)
