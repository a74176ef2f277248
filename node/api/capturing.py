"""The part of `me.train(task)` that uses torch, in the program's own process: it captures a torch model."""

from pathlib import Path

from node.errors import UsageError

VALUES_SUFFIX = ".safetensors"


def capture_object(task: object, graph: Path) -> None:
    """Capture a `partition.capture.Task`, check that the graph is equivalent, and write the graph and the
    initial values next to each other.

    Raises:
        UsageError: the object is not a Task, or the model cannot be captured.
    """
    from partition.capture.errors import CaptureRefused
    from partition.capture.task import Task, captured_and_proved
    from partition.capture.weights import write_weights

    if not isinstance(task, Task):
        raise UsageError(
            "train(): a model must be a RUN.toml, a built-in name, a captured file, PATH.py:FUNCTION or a "
            f"Task, not a {type(task).__name__}",
            "make one with partition.capture.Task(model, example_inputs, labels, loss)",
        )
    try:
        found, _ = captured_and_proved(task)
        graph.write_bytes(found.data)
        if found.stored:
            write_weights(graph.with_suffix(VALUES_SUFFIX), found)
    except (CaptureRefused, OSError) as error:
        raise UsageError(f"train(): model: {error}") from None
