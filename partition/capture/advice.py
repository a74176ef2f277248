"""Advice about operators that a graph must not contain: alternatives, shown to a user with a refusal."""

import difflib
import re

from partition.model.operators import OPERATORS

SIZED_BY_DATA = (
    "keep all elements and use a mask: instead of x[mask] = f(x[mask]), write x = "
    "torch.where(mask, f(x), x). Compute a mixture of experts as the sum of all "
    "experts times their weights, which are zero if an expert is not chosen"
)
_REMEDIES = (
    (
        r"histc|bincount|grouped_mm|_grouped",
        (
            "count with one_hot(...).sum(0); for a mixture of experts of transformers, "
            'set config._experts_implementation = "batched_mm"'
        ),
    ),
    (
        r"unique|nonzero|masked_select|argwhere|_local_scalar|repeat_interleave",
        "its size depends on the data; keep all elements and use a mask, torch.where or a fixed top-k",
    ),
    (r"sparse|_coo_|_csr_|to_mkldnn", "use dense tensors"),
    (r"nested|jagged", "pad to one length and pass a mask"),
    (r"quantize|fake_quant", "train without quantization; quantize the result"),
    (r"linalg_|svd|eig|cholesky|lu_|qr", "compute it outside the model, or use a matrix product"),
    (r"lstm|gru|rnn|cudnn|miopen", "use nn.LSTM, nn.GRU or nn.RNN with a fixed sequence length"),
    (r"flash|efficient|flex_attention", "use scaled_dot_product_attention"),
    (r"scatter_reduce|index_reduce", "use scatter_add or index_add, and divide by a count"),
    (r"as_strided|set_|resize_", "use view, unfold or slices"),
    (r"multinomial|poisson|binomial|geometric", "draw with torch.rand or torch.randn and compare the result"),
)
_LISTED = "docs/models.md lists all operators that a graph may contain"
_NEAR = 0.72


def remedy_for(operator: str) -> str:
    """Return the advice about an operator, given its full name such as `aten.histc.default`."""
    space, _, short = operator.partition(".")
    base = short.rpartition(".")[0] or short
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, base):
            return remedy
    if space not in ("aten", "prims"):
        return f"it belongs to {space}, not to torch. Write it with operators of torch"
    bases = sorted({name.split(".")[1] for name in OPERATORS})
    near = difflib.get_close_matches(base.strip("_"), bases, 1, _NEAR)
    if near:
        return f"use {near[0]}, which a graph may contain; {_LISTED}"
    return f"write it with other operators; {_LISTED}"
