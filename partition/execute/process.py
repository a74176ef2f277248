"""Torch's global switches, set permanently for a process that only hosts one stage, or temporarily."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

KEPT_BYTES = 128 << 20
"""Freed memory that the heap keeps. By default glibc returns the memory that a micro-batch has freed to the
system, and gets it back for the next one, zeroed page by page. That took half of a call's time in addition to
its computing."""
MAPPED_BYTES = 32 << 20
"""Allocations smaller than this come from the heap; glibc allows no larger limit."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


_COMPILER = "torch._dynamo"


class _DeferredCompiler(ModuleType):
    """Torch's compiler, of which only a part is loaded until something needs more.

    Fake tensors read its settings, and optimizers use it to exclude their functions. For these two purposes
    torch loads all of it: 0.7 s of CPU time and 40 MiB in every process, although nothing is compiled.
    """

    def __init__(self) -> None:
        super().__init__(_COMPILER)
        self.__path__ = [f"{folder}/_dynamo" for folder in torch.__path__]

    @staticmethod
    def disable(function: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        """Return the function unchanged: a process that never compiles need not exclude it."""
        return function

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        """Do nothing, because there is no compiled graph."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # attributes that the import system tries
        del sys.modules[_COMPILER], torch._dynamo
        import torch._dynamo as whole

        for part, module in vars(self).items():
            vars(whole).setdefault(part, module)
        return getattr(whole, name)


def defer_compiler() -> None:
    """Make a process that never compiles load torch's compiler only on demand. Call this before the compiler
    is used."""
    if _COMPILER not in sys.modules:
        sys.modules[_COMPILER] = torch._dynamo = _DeferredCompiler()


def load_late_modules() -> None:
    """Load modules that torch otherwise loads only at the first admission."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401 - operators on fake tensors ask it

    FakeTensorMode()


def load_operators(device: torch.device) -> None:
    """Run a few operators of every kind forward and backward. This loads the pages of torch's code that a
    stage needs, about 40 MiB, which the system loads only when they are run."""
    load_late_modules()
    image, rows = (torch.randn(*sides, device=device, requires_grad=True) for sides in ((2, 3, 8, 8), (4, 8)))
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    kernels = [torch.randn(3, count, 3, 3, device=device, requires_grad=True) for count in (3, 1)]
    q, k, v = (torch.randn(1, 2, 4, 8, device=device, requires_grad=True) for _ in range(3))
    numbers = torch.arange(4, device=device)
    for made in (
        functional.linear(rows, weight),
        functional.conv2d(image, kernels[0]),
        functional.conv2d(image, kernels[1], groups=3),
        functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        functional.layer_norm(functional.gelu(functional.dropout(rows, 0.1)), (8,)),
        functional.batch_norm(functional.max_pool2d(image, 2), None, None, training=True),
        functional.cross_entropy(functional.embedding(numbers, weight), numbers),
    ):
        made.sum().backward()  # type: ignore[no-untyped-call]  # torch's
    torch.optim.Adam([weight], foreach=False).step()


def prepare_process(threads: int) -> None:
    """Set torch's global switches: the number of `threads`, and deterministic results."""
    torch.set_num_interop_threads(1)
    _repeat_exactly(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def set_threads(threads: int) -> None:
    """Compute with this many threads from now on. The last bits of sums may change."""
    torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread and deterministic results while stages run along with other code; restore the settings
    afterwards."""
    threads, is_exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # set by name
    _repeat_exactly(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode("error" if is_exact else "default")
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]  # as above


def _repeat_exactly(threads: int) -> None:
    torch.set_num_threads(threads)
    # Does the same as `use_deterministic_algorithms(True)`, which would also load torch's compiler in order
    # to inform it.
    torch.set_deterministic_debug_mode("error")
    # Filling fresh memory is for finding bugs in operators; here it only costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by name


def release_memory(device: str) -> None:
    """Return freed memory to the system, on an accelerator too."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Make the heap keep freed memory until this process ends."""
    if sys.platform == "linux":
        # C libraries other than glibc do not have mallopt, and may not need it.
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)
        if set_option is not None:
            set_option(_M_MMAP_THRESHOLD, MAPPED_BYTES)
            set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)
