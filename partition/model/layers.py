"""What a layer is, as data: its parameters, shapes and cost. No torch here; `partition.execute` computes.

All shapes are of one sample, without the batch dimension. Costs are per sample and forward; a
backward pass costs about twice the forward one. One multiply-add counts as two FLOPs, as in
`torch.utils.flop_counter`, and every other output element as one.

`saved_bytes` is what autograd keeps of a layer until the backward pass. It is an upper bound: where a
layer saves its output and the next one its input, the one tensor is counted twice.
"""

from math import prod

import msgspec

Shape = tuple[int, ...]

_INDEX_BYTES = 8
"""Max pooling remembers the place of each maximum as an int64."""


class Parameter(msgspec.Struct, frozen=True):
    """One trainable tensor. `name` is its key in torch's state dict; `fan_in` scales its first values."""

    name: str
    shape: Shape
    fan_in: int

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


class Layer(msgspec.Struct, frozen=True):
    """One step of a model. `name` is the module's name in torch's state dict.

    Its answers are only meaningful for an input shape that `output_shape` accepts.
    """

    name: str

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of torch's state dict: the weight, then the bias."""
        return ()

    def output_shape(self, shape: Shape) -> Shape:
        """The shape that comes out when `shape` goes in. Raises ValueError where it does not fit."""
        return shape

    def flops(self, shape: Shape) -> int:
        """Forward floating-point operations per sample."""
        return prod(self.output_shape(shape))

    def saved_bytes(self, shape: Shape, item_bytes: int) -> int:
        """Bytes kept per sample for the backward pass, at `item_bytes` per element: the input, for most."""
        return prod(shape) * item_bytes


class Conv2d(Layer, frozen=True):
    """A square convolution with stride 1 and a bias: (channels_in, H, W) to (channels_out, H', W')."""

    channels_in: int
    channels_out: int
    kernel: int
    padding: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        fan_in = self.channels_in * self.kernel * self.kernel
        weight = (self.channels_out, self.channels_in, self.kernel, self.kernel)
        return (
            Parameter(f"{self.name}.weight", weight, fan_in),
            Parameter(f"{self.name}.bias", (self.channels_out,), fan_in),
        )

    def output_shape(self, shape: Shape) -> Shape:
        _want_image(self, shape)
        channels, height, width = shape
        grow = 2 * self.padding - self.kernel + 1
        if channels != self.channels_in or height + grow < 1 or width + grow < 1:
            raise ValueError(f"{self.name} cannot take a sample of shape {shape}")
        return (self.channels_out, height + grow, width + grow)

    def flops(self, shape: Shape) -> int:
        return 2 * self.channels_in * self.kernel * self.kernel * prod(self.output_shape(shape))


class MaxPool2d(Layer, frozen=True):
    """The largest of each `size` x `size` square; a remainder at the edge is dropped, as torch does."""

    size: int

    def output_shape(self, shape: Shape) -> Shape:
        _want_image(self, shape)
        channels, height, width = shape
        if height < self.size or width < self.size:
            raise ValueError(f"{self.name} cannot halve a sample of shape {shape}")
        return (channels, height // self.size, width // self.size)

    def flops(self, shape: Shape) -> int:
        return self.size * self.size * prod(self.output_shape(shape))

    def saved_bytes(self, shape: Shape, item_bytes: int) -> int:
        return prod(shape) * item_bytes + prod(self.output_shape(shape)) * _INDEX_BYTES


class ReLU(Layer, frozen=True):
    """max(x, 0)."""


class Flatten(Layer, frozen=True):
    """Any shape to one dimension; a view, so it costs nothing."""

    def output_shape(self, shape: Shape) -> Shape:
        return (prod(shape),)

    def flops(self, shape: Shape) -> int:  # noqa: ARG002 - free for any shape
        return 0

    def saved_bytes(self, shape: Shape, item_bytes: int) -> int:  # noqa: ARG002 - free for any shape
        return 0


class Linear(Layer, frozen=True):
    """A fully connected layer with a bias: (features_in,) to (features_out,)."""

    features_in: int
    features_out: int

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (
            Parameter(f"{self.name}.weight", (self.features_out, self.features_in), self.features_in),
            Parameter(f"{self.name}.bias", (self.features_out,), self.features_in),
        )

    def output_shape(self, shape: Shape) -> Shape:
        if shape != (self.features_in,):
            raise ValueError(f"{self.name} cannot take a sample of shape {shape}")
        return (self.features_out,)

    def flops(self, shape: Shape) -> int:  # noqa: ARG002 - it takes only one shape
        return 2 * self.features_in * self.features_out


class Dropout(Layer, frozen=True):
    """While training, zeroes each element with `probability` and scales the rest by 1/(1 - probability)."""

    probability: float


def _want_image(layer: Layer, shape: Shape) -> None:
    if len(shape) != 3:
        raise ValueError(f"{layer.name} wants (channels, height, width), not a sample of shape {shape}")
