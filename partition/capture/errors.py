"""Why a model cannot be captured: the exceptions of this side, with the operator or module in their text."""


class CaptureRefused(ValueError):
    """A model, a loss or an operator that cannot become a graph, or whose graph is not the model.

    The text says where (module, line, operator or parameter) and what to do. `reasons` are all of them where
    the text leaves some out.
    """

    def __init__(self, text: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons


class SizesRefused(CaptureRefused):
    """A size that should vary and cannot, or not so far: with other bounds the model may do."""


class EvaluationDiffers(CaptureRefused):
    """The graph is the model while it is trained, and not while it is evaluated."""
