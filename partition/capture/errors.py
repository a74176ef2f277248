"""Exceptions of capture, with the operator or module in their text."""


class CaptureRefused(ValueError):
    """A model, a loss or an operator that cannot become a graph, or whose graph differs from the model.

    The text says where (module, line, operator or parameter) and what to do. `reasons` has all reasons, if
    the text leaves some out.
    """

    def __init__(self, text: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons


class SizesRefused(CaptureRefused):
    """A size that should vary cannot, or not within the given bounds; the model may work with different
    bounds."""


class EvaluationDiffers(CaptureRefused):
    """The graph equals the model in training, but not in evaluation."""
