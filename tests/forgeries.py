"""Checkpoints as somebody would forge them who knows the format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def reseal(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and make its digest right again, as somebody who knows the format would."""
    fields = json.loads((directory / "manifest.json").read_text())
    del fields["sha256"]
    change(fields)
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps({**fields, "sha256": digest}, indent=1) + "\n")


def forge(directory: Path, file: str, contents: Any) -> None:
    """Replace a file, and have the manifest agree with it."""
    torch.save(contents, directory / file)
    raw = (directory / file).read_bytes()
    entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    reseal(directory, lambda fields: fields["files"].update({file: entry}))


class Malicious:
    """Runs a command when it is unpickled by somebody careless."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)
