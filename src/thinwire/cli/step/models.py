"""What is trained in the benchmark: two transformers, a ResNet-50 and a tiny model for tests, on random data.

Step times depend on shapes, not on what is learnt, so there are no data files. Batches are small: forward and backward
take one core 0.1 to 1 s, about what a GPU takes for a batch that fills it, and the wire has as long to hide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.cli.bench_exchange import SHAPE, VOCABULARY
from thinwire.cli.charlm import CharTransformer, ModelShape

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model whose forward takes a batch (inputs, targets) and returns the loss, and a batch for it."""

    description: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]


def _transformer(shape: ModelShape, windows: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        tokens = torch.randint(VOCABULARY, (windows, shape.context + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Workload(
        f"transformer, {shape.layers} layers of width {shape.width}, {windows} windows of {shape.context} tokens",
        lambda: CharTransformer(VOCABULARY, shape),
        batch,
    )


class _Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, around a shortcut."""

    EXPANSION = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.EXPANSION
        self.body = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, `EXPANSION` times as wide as its middle."""
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(out)


class ResNet50(nn.Module):
    """He et al. 2016 with its 3-4-6-3 bottleneck blocks; forward returns the mean cross-entropy."""

    BLOCKS = (3, 4, 6, 3)
    CLASSES = 1000

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for stage, blocks in enumerate(self.BLOCKS):
            width = 64 * 2**stage
            for block in range(blocks):
                layers.append(_Bottleneck(channels, width, stride=2 if stage > 0 and block == 0 else 1))
                channels = width * _Bottleneck.EXPANSION
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, self.CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the images."""
        return nn.functional.cross_entropy(self.head(self.features(images)), labels)


def _resnet50(images: int, pixels: int) -> Workload:
    def batch(generator: torch.Generator) -> Batch:
        pictures = torch.randn(images, 3, pixels, pixels, generator=generator)
        return pictures, torch.randint(ResNet50.CLASSES, (images,), generator=generator)

    return Workload(f"ResNet-50, {images} images of {pixels}×{pixels} pixels", ResNet50, batch)


MODELS: dict[str, Workload] = {
    "lm-7m": _transformer(SHAPE, windows=2),
    "lm-50m": _transformer(ModelShape(layers=16, width=512, context=64), windows=2),
    "resnet50": _resnet50(images=8, pixels=64),
    "lm-tiny": _transformer(ModelShape(layers=2, width=64, context=16), windows=2),
}


@functools.cache
def parameter_shapes(model: str) -> tuple[torch.Size, ...]:
    """Of all parameters of a model, without allocating them."""
    with torch.device("meta"):
        return tuple(p.shape for p in MODELS[model].build().parameters())


def parameter_count(model: str) -> int:
    """Elements of all parameters of a model."""
    return sum(shape.numel() for shape in parameter_shapes(model))
