"""Why a model cannot be captured: the exceptions of this side, with the operator or module in their text."""


class CaptureRefused(ValueError):
    """A model, a loss or an operator that cannot become a graph, or whose graph is not the model.

    The text says where (module, operator or parameter) and what to do.
    """


class SizesRefused(CaptureRefused):
    """A size that should vary and cannot, or not so far: with other bounds the model may do."""


class EvaluationDiffers(CaptureRefused):
    """The graph is the model while it is trained, and not while it is evaluated."""
