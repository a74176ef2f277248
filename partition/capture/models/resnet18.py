"""`resnet18`: He et al. 2015 (arXiv 1512.03385), with torchvision's architecture and state-dict names.

So torchvision's weights fit. Images below 64 pixels get the paper's own stem for CIFAR instead, a 3x3
convolution without pooling: after its five halvings, torchvision's would leave one pixel of a 32x32 image.
"""

import torch
from torch import nn

from partition.capture.task import Task, correct, cross_entropy

SMALL_SIDE_MAX = 63
"""The largest side for which the small stem is chosen."""
WIDTH = 64
"""The number of channels before the first of three doublings."""
_LAYERS = 4
_BLOCKS = 2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection, to which `downsample` is applied if the shapes differ."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        inner = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: torch.Tensor = self.relu(inner + skip)
        return out


class ResNet18(nn.Module):
    """A network that maps (batch, channels, height, width) to logits (batch, classes)."""

    def __init__(self, channels: int, classes: int, *, small: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        if small:
            self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        else:
            self.conv1 = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        before = width
        for number in range(1, _LAYERS + 1):
            blocks = []
            for block in range(_BLOCKS):
                stride = 2 if block == 0 and number > 1 else 1
                width *= stride
                blocks.append(BasicBlock(before, width, stride))
                before = width
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, _LAYERS + 1):
            x = getattr(self, f"layer{number}")(x)
        logits: torch.Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def resnet18(sample_shape: tuple[int, ...], classes: int) -> Task:
    """Return the task for samples of (channels, height, width). Raises ValueError for invalid options."""
    if len(sample_shape) != 3 or min(sample_shape) < 1 or min(sample_shape[1:]) < 8:
        raise ValueError(
            "resnet18 needs images of (channels, height, width) with at least 8 x 8 "
            f"pixels, not samples of shape {sample_shape}"
        )
    small = min(sample_shape[1:]) <= SMALL_SIDE_MAX
    return Task(
        ResNet18(sample_shape[0], classes, small=small),
        example_inputs=(torch.zeros(2, *sample_shape),),
        labels=(torch.zeros(2, dtype=torch.int64),),
        loss=cross_entropy,
        metrics={"correct": correct},
        name="resnet18",
    )
