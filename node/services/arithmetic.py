"""The variables of the environment by which libraries of arithmetic, and the choice of GPUs, are set up."""

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
    """Return those of an environment. All else stays with the node: some of it is secret."""
    return {name: value for name, value in given.items() if name.startswith(PREFIXES)}
