"""`simple-cnn`: CloudMesh's image classifier, three convolutions and two linear layers.

The architecture and the parameter names are those of the seed project, so that its CIFAR-10 result is
comparable. For 3x32x32 it is the same model; the first linear layer follows the sample's size, and the
three halvings want sides of at least 8 (scikit-learn's digits are 1x8x8).
"""

from math import prod

from partition.model.layers import Conv2d, Dropout, Flatten, Layer, Linear, MaxPool2d, ReLU, Shape

_SIDE_MIN = 8
_HALVINGS = 3
_WIDTHS = (32, 64, 128)
_HIDDEN = 512
_DROPOUT = 0.5


def layers(sample_shape: Shape, classes: int) -> tuple[Layer, ...]:
    """The layers for samples of (channels, height, width). Raises ValueError for what does not fit."""
    if len(sample_shape) != 3 or min(sample_shape[1:]) < _SIDE_MIN or sample_shape[0] < 1:
        raise ValueError(
            f"simple-cnn wants images of (channels, height, width) from {_SIDE_MIN} x {_SIDE_MIN} pixels,"
            f" not samples of shape {sample_shape}"
        )
    channels, height, width = sample_shape
    first, second, third = _WIDTHS
    flat = prod((third, height >> _HALVINGS, width >> _HALVINGS))
    return (
        Conv2d("conv1", channels, first, kernel=3, padding=1),
        ReLU("relu1"),
        MaxPool2d("pool1", size=2),
        Conv2d("conv2", first, second, kernel=3, padding=1),
        ReLU("relu2"),
        MaxPool2d("pool2", size=2),
        Conv2d("conv3", second, third, kernel=3, padding=1),
        ReLU("relu3"),
        MaxPool2d("pool3", size=2),
        Flatten("flatten"),
        Linear("fc1", flat, _HIDDEN),
        ReLU("relu4"),
        Dropout("dropout", probability=_DROPOUT),
        Linear("fc2", _HIDDEN, classes),
    )
