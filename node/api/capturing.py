"""What `me.train(task)` and `me.serve(file)` do with torch, in the program's own process.

`capture_object` makes a captured file of an object of torch; `prove_served` computes a captured file before
it is served. Imported only by a program that calls one of them.
"""

from pathlib import Path

from node.content.graphs import read_captured
from node.errors import UsageError
from node.serving.asking import CONTEXT_USUAL, captured_files
from node.serving.planning import served_graph

VALUES_SUFFIX = ".safetensors"
MIXES_DO = (
    "have nothing but causal attention mix tokens: scaled_dot_product_attention(..., is_causal=True) "
    "without a mask"
)


def capture_object(task: object, graph: Path) -> None:
    """Capture a `partition.capture.Task`, prove it, and write graph and first values beside each other.

    Raises:
        UsageError: it is no Task, or a model that cannot be captured.
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


def prove_served(model: str, context: int = 0) -> None:
    """Prove that a FILE.peerloom, served in sessions of `context` tokens, gives the logits of its model.

    Raises:
        UsageError: there is no such file, or its model cannot be served.
    """
    path, values, _ = captured_files(model)
    _, captured, _ = read_captured(path, values)
    served = served_graph(captured, model, context or CONTEXT_USUAL)
    # Late: a file that is none is refused at once.
    from partition.capture.errors import CaptureRefused
    from partition.capture.serving_proof import prove_graph_served

    try:
        prove_graph_served(served, captured)
    except CaptureRefused as error:
        raise UsageError(f"{model}: this model cannot be served: {error}", MIXES_DO) from None
