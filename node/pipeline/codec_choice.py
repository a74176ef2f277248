"""Chooses the codec for a stage's outgoing frames from the measured rates of the links that they take.

Until a link is measured, its frames are as small as the run allows. After that, the codec with the shortest
total time for a micro-batch is used (`partition.codecs.choice`), so that compression is never the bottleneck.
A codec's time on this machine is measured once, on the run's own frames.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from crypto.identity import PeerId
from node.seams import Executor
from partition.codecs.base import Array
from partition.codecs.choice import Cost, Frames, allowed, choose, narrowest
from partition.codecs.codec import Codec, Payload, unpack

SAMPLE_BYTES = 1 << 18
"""Bytes of tensors that are collected before codecs are measured, because a short tensor alone says
little."""
SHORT_BYTES = 1 << 13
"""A tensor shorter than this is not used for measuring. A frame shorter than this is sent uncompressed if
nothing may be lost, because sending it takes less time than compressing."""
SAMPLE_BYTES_MAX = 1 << 20


class LinkCodecs:
    """The codec choice for one stage. `rate` returns a link's bytes per second, None if unknown."""

    def __init__(self, frames: Frames, rate: Callable[[PeerId], float | None], executor: Executor) -> None:
        self._frames = frames
        self._rate = rate
        self._executor = executor
        self._costs: Mapping[Codec, Cost] | None = None
        self._sizes: dict[bool, int] = {}
        self._sample: list[Array] = []
        self._sample_bytes = 0

    def codec(self, receivers: Sequence[PeerId], *, is_gradient: bool) -> Codec:
        """Return the codec for a frame to these peers; the slowest of their links decides."""
        rates = [self._rate(peer) for peer in receivers]
        known = [rate for rate in rates if rate is not None]
        size = self._sizes.get(is_gradient)
        if self._frames == "exact" and size is not None and size < SHORT_BYTES:
            return "raw"
        if self._costs is None or size is None or not known or len(known) < len(rates):
            return narrowest(self._frames, is_gradient=is_gradient)
        codecs = allowed(self._frames, is_gradient=is_gradient)
        return choose(codecs, size, "float32", min(known), self._costs)

    async def learn(self, payload: Payload, *, is_gradient: bool) -> None:
        """Learn from a packed frame: its size and, once, the codecs' times."""
        self._sizes[is_gradient] = payload.size_bytes
        if self._costs is not None:
            return
        for place, tensor in enumerate(payload.tensors):
            if tensor.dtype in ("float32", "float64") and tensor.size_bytes >= SHORT_BYTES:
                arrays = await self._executor.run(lambda: unpack(payload, bytes_max=payload.size_bytes))
                self._sample.append(arrays[place][1].reshape(-1).astype("f4")[: SAMPLE_BYTES_MAX // 4])
                self._sample_bytes += tensor.size_bytes
                if self._sample_bytes >= SAMPLE_BYTES:
                    sample, self._sample = self._sample, []
                    self._costs = await self._executor.calibrate(np.concatenate(sample))
                return
