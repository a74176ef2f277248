"""The GPUs that torch finds under the names cuda:0, cuda:1 and so on, and their memory.

NVIDIA's driver lists its own GPUs. Linux lists AMD's under /sys; torch built for ROCm calls these `cuda` too.
GPUs that the environment hides are left out: CUDA_VISIBLE_DEVICES, which the user or a batch system sets,
lists the GPUs that this process may use, in order.
"""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.services.torch_extra import NO_TORCH

KFD = "class/kfd/kfd/topology/nodes"
"""Linux's list of the compute devices of AMD's driver. It also has processors, with the id 0."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: its total and free memory in bytes."""

    total_bytes: int
    free_bytes: int


def gpus(
    environment: Mapping[str, str],
    system: Path = Path("/sys"),
    version_of: Callable[[str], str] = importlib.metadata.version,
) -> tuple[list[Gpu], str]:
    """Return the GPUs in torch's order, and the reason if there are none. `version_of` returns the version of
    an installed package."""
    try:
        build = version_of("torch").partition("+")[2]
    except importlib.metadata.PackageNotFoundError:
        return [], NO_TORCH
    if build == "cpu":
        return [], "torch was installed without CUDA here"
    if build.startswith("rocm"):
        found = _of_amd(system)
        for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            found = [found[place] for place in visible(environment.get(name), len(found))]
        return found, "" if found else "there is no such AMD GPU, or this process may not use it"
    return _of_nvidia(environment.get("CUDA_VISIBLE_DEVICES"))


def visible(said: str | None, count: int, names: Sequence[str] = ()) -> list[int]:
    """Return the indices below `count` that a variable such as CUDA_VISIBLE_DEVICES leaves visible, in its
    order.

    None leaves all visible. As in the drivers, the first invalid entry ends the list. `names` are other
    identifiers of each index, such as UUIDs; a prefix suffices.
    """
    if said is None:
        return list(range(count))
    found: list[int] = []
    for word in (part.strip() for part in said.split(",")):
        matches = [place for place, name in enumerate(names) if word and name.startswith(word)]
        if word.isdecimal() and int(word) < count:
            matches = [int(word)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def _of_nvidia(said: str | None) -> tuple[list[Gpu], str]:
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(int(pynvml.nvmlDeviceGetCount()))]
        names = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = [handles[place] for place in visible(said, len(handles), names)]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in chosen]
    except pynvml.NVMLError:
        return [], "there is no such GPU, or no driver for it"
    if handles and not chosen:
        return [], "CUDA_VISIBLE_DEVICES hides the GPUs of this machine"
    found = [Gpu(int(each.total), int(each.free)) for each in memory]
    return found, "" if found else "there is no such GPU"


def _of_amd(system: Path) -> list[Gpu]:
    found = []
    with suppress(OSError, ValueError):
        for node in sorted((system / KFD).iterdir(), key=lambda each: int(each.name)):
            if (node / "gpu_id").read_text().strip() == "0":
                continue
            minor = _properties(node / "properties").get("drm_render_minor", 0)
            device = system / f"class/drm/renderD{minor}/device"
            total = int((device / "mem_info_vram_total").read_text())
            found.append(Gpu(total, total - int((device / "mem_info_vram_used").read_text())))
    return found


def _properties(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2}
