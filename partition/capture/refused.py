"""Why a model cannot be captured: the one exception of this side, with the operator or module in its text."""


class CaptureRefused(ValueError):
    """A model, a loss or an operator that cannot become a graph, or whose graph is not the model.

    The text says where (module, operator or parameter) and what to do.
    """
