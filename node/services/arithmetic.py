"""The environment variables that configure arithmetic libraries and the choice of GPUs."""

from collections.abc import Mapping

PREFIXES = (
    "CUDA_",
    "GOMP_",
    "HIP_",
    "KMP_",
    "LC_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "PYTORCH_",
    "ROCR_",
)


def arithmetic_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return these variables of an environment. All others are withheld from the process, because some are
    secret."""
    return {name: value for name, value in given.items() if name.startswith(PREFIXES)}
