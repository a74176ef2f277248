"""Exceptions of capture, with the operator or module in their text."""


class CaptureRefused(ValueError):
    """A model, a loss or an operator that cannot become a graph, or whose graph is not the model.

    The text says where (module, line, operator or parameter) and what to do. `reasons` has all reasons where
    the text leaves some out.
    """

    def __init__(self, text: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons


class SizesRefused(CaptureRefused):
    """A size that should vary cannot, or not that far: the model may work with other bounds."""


class EvaluationDiffers(CaptureRefused):
    """The graph is the model in training, but not in evaluation."""
