"""What the demo trains: a small character-level transformer, and the text for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

HEAD_WIDTH = 32
VALIDATION_SHARE = 0.1
# Four bytes a character in every worker while it is encoded: enough for any demo, too little to exhaust a laptop.
LONGEST_TEXT = 20_000_000


@dataclass(frozen=True)
class ModelShape:
    """Size of the transformer; ``context`` is also the length of a training window."""

    layers: int = 3
    width: int = 128
    context: int = 64

    def __post_init__(self) -> None:
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise ValueError(f"width must be a multiple of {HEAD_WIDTH} (the width of a head), got {self.width}")


def load_text(path: Path | None) -> str:
    """Read a UTF-8 file, or without one the help texts that come with Python."""
    if path is None:
        from pydoc_data.topics import topics

        return "".join(topics[key] for key in sorted(topics))
    with path.open(encoding="utf-8") as file:
        return file.read(LONGEST_TEXT)


@dataclass(frozen=True)
class Corpus:
    """Text as character numbers: the first part to train on, the last tenth to validate on."""

    vocabulary_size: int
    training: Tensor
    validation: Tensor

    @staticmethod
    def shortest_text(context: int) -> int:
        """Characters that ``from_text`` needs, so that a window and its targets fit into the validation part."""
        return round((context + 1) / VALIDATION_SHARE) + 1

    @classmethod
    def from_text(cls, text: str, context: int) -> Corpus:
        """Number the characters that occur, and split."""
        if len(text) < cls.shortest_text(context):
            raise ValueError(
                f"the text has {len(text)} characters; a context of {context} needs at least "
                f"{cls.shortest_text(context)}, because the last {VALIDATION_SHARE:.0%} is kept for validation"
            )
        code_points = torch.frombuffer(bytearray(text, "utf-32-le"), dtype=torch.int32)
        vocabulary, tokens = code_points.unique(return_inverse=True)
        split = len(tokens) - int(len(tokens) * VALIDATION_SHARE)
        return cls(len(vocabulary), tokens[:split], tokens[split:])

    def training_batch(self, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Windows that begin at ``starts``, and the same windows one character on: the targets."""
        return _windows(self.training, starts, context)

    def validation_windows(self, context: int, at_most: int) -> tuple[Tensor, Tensor]:
        """Up to ``at_most`` windows that do not overlap, spread evenly over the validation part."""
        room = (len(self.validation) - 1) // context
        count = min(room, at_most)
        starts = torch.arange(count) * room // count * context
        return _windows(self.validation, starts, context)


def _windows(tokens: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = tokens[starts.unsqueeze(1) + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


class CharTransformer(nn.Module):
    """A pre-norm causal transformer over characters; its output is the mean cross-entropy of the next one."""

    def __init__(self, vocabulary_size: int, shape: ModelShape) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        block = nn.TransformerEncoderLayer(
            shape.width,
            nhead=shape.width // HEAD_WIDTH,
            dim_feedforward=4 * shape.width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(
            block, shape.layers, norm=nn.LayerNorm(shape.width), enable_nested_tensor=False
        )
        self.head = nn.Linear(shape.width, vocabulary_size, bias=False)
        self.causal_mask: Tensor
        mask = nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("causal_mask", mask, persistent=False)
        # torch's default of N(0, 1) for embeddings dwarfs what a few hundred small steps can change.
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, characters: Tensor, targets: Tensor) -> Tensor:
        """Mean loss, in nats a character."""
        hidden = self.characters(characters) + self.positions.weight
        hidden = self.blocks(hidden, mask=self.causal_mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())
