"""The use of torch by `me.train(task)`, in the program's own process: capturing an object of torch."""

from pathlib import Path

from node.errors import UsageError

VALUES_SUFFIX = ".safetensors"


def capture_object(task: object, graph: Path) -> None:
    """Capture a `partition.capture.Task`, prove it, and write graph and first values beside each other.

    Raises:
        UsageError: it is not a Task, or the model cannot be captured.
    """
    from partition.capture.errors import CaptureRefused
    from partition.capture.task import Task, captured_and_proved
    from partition.capture.weights import write_weights

    if not isinstance(task, Task):
        raise UsageError(
            f"train(): a model is a RUN.toml, a built-in name, a captured file, PATH.py:FUNCTION or a Task, "
            f"not a {type(task).__name__}",
            "partition.capture.Task(model, example_inputs, labels, loss)",
        )
    try:
        found, _ = captured_and_proved(task)
        graph.write_bytes(found.data)
        if found.stored:
            write_weights(graph.with_suffix(VALUES_SUFFIX), found)
    except (CaptureRefused, OSError) as error:
        raise UsageError(f"train(): model: {error}") from None
