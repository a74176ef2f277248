"""Advice for operators that no graph may name: alternatives, for a person who is told of a refusal."""

import difflib
import re

from partition.model.operators import OPERATORS

SIZED_BY_DATA = (
    "keep all elements and use a mask: x[mask] = f(x[mask]) is x = torch.where(mask, f(x), x), and a mixture "
    "of experts is the sum of all experts times their weights, zero where they are not chosen"
)
_REMEDIES = (
    (
        r"histc|bincount|grouped_mm|_grouped",
        "count by one_hot(...).sum(0); a mixture of experts of transformers: "
        'config._experts_implementation = "batched_mm"',
    ),
    (
        r"unique|nonzero|masked_select|argwhere|_local_scalar|repeat_interleave",
        "its size depends on the data; keep all elements and use a mask, torch.where or a fixed top-k",
    ),
    (r"sparse|_coo_|_csr_|to_mkldnn", "use dense tensors"),
    (r"nested|jagged", "pad to one length and pass a mask"),
    (r"quantize|fake_quant", "train without quantization; quantize the result"),
    (r"linalg_|svd|eig|cholesky|lu_|qr", "compute it outside of the model, or use a matrix product"),
    (r"lstm|gru|rnn|cudnn|miopen", "use nn.LSTM, nn.GRU or nn.RNN of a fixed sequence"),
    (r"flash|efficient|flex_attention", "use scaled_dot_product_attention"),
    (r"scatter_reduce|index_reduce", "use scatter_add or index_add, and divide by a count"),
    (r"as_strided|set_|resize_", "use view, unfold or slices"),
    (r"multinomial|poisson|binomial|geometric", "draw with torch.rand or torch.randn and compare"),
)
_LISTED = "docs/models.md has all operators that may be in one"
_NEAR = 0.72


def remedy_for(operator: str) -> str:
    """Return the advice for an operator by its full name, `aten.histc.default`."""
    space, _, short = operator.partition(".")
    base = short.rpartition(".")[0] or short
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, base):
            return remedy
    if space not in ("aten", "prims"):
        return f"it is an operator of {space} and not of torch: write it with operators of torch"
    bases = sorted({name.split(".")[1] for name in OPERATORS})
    near = difflib.get_close_matches(base.strip("_"), bases, 1, _NEAR)
    return f"{near[0]} may be in one; {_LISTED}" if near else f"write it with others; {_LISTED}"
