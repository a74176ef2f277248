"""Torch's global switches for a process that does nothing but host one stage."""

import torch


def prepare_process(threads: int) -> None:
    """Set them: as many threads, and equal results for equal requests."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is for finding bugs in operators; it is only a cost here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by name
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
