"""Small pictures, as IDX files hold them: Fashion-MNIST, or anything else of its form."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import torch
from torch import Tensor, nn

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist puts it."""
_BYTES = 0x08
"""The type of elements in an IDX file: one byte each, unsigned."""


def read_idx(path: Path) -> Tensor:
    """The array in an IDX file of bytes, which may be compressed by gzip.

    Raises:
        ValueError: when it is not one.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _BYTES:
        raise ValueError(f"{path}: expected an IDX file of bytes, which begins with 00 00 08; got {data[:4].hex(' ')}")
    head = 4 + 4 * data[3]
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, head, 4)]
    if len(data) != head + math.prod(shape):
        raise ValueError(f"{path}: has {len(data)} bytes; {shape} of them after {head} of header were expected")
    return torch.frombuffer(bytearray(data[head:]), dtype=torch.uint8).view(shape)


def read_pictures(directory: Path, part: str) -> tuple[Tensor, Tensor]:
    """Pictures with values around 0, and their labels; `part` is "train" or "t10k".

    Raises:
        FileNotFoundError: telling where to get them.
    """
    found = {}
    for kind, dimensions in (("images", 3), ("labels", 1)):
        name = f"{part}-{kind}-idx{dimensions}-ubyte"
        paths = [path for path in (directory / name, directory / f"{name}.gz") if path.exists()]
        if not paths:
            raise FileNotFoundError(
                f"{directory / name}[.gz] is not there: on Debian `apt-get install dataset-fashion-mnist` brings "
                f"{FASHION_MNIST}; elsewhere give --pictures a directory with the four IDX files"
            )
        found[kind] = read_idx(paths[0])
    pictures = (found["images"].float() / 255 - 0.5) * 2
    return pictures.unsqueeze(1), found["labels"].long()


class PictureNet(nn.Module):
    """Two convolutions and two layers; 100,000 parameters for ten kinds of pictures of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10))

    def logits(self, pictures: Tensor) -> Tensor:
        """How much each picture looks like each kind."""
        return self.head(self.features(pictures))

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return nn.functional.cross_entropy(self.logits(pictures), labels)
