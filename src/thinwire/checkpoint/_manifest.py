"""The manifest of a checkpoint: which run saved it, and the size and digest of every file.

It is JSON and contains a SHA-256 of its own contents. `decode` accepts it only if `encode` would write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from thinwire._checks import INT64_MAX, is_integer

MANIFEST = "manifest.json"
MODEL = "model.pt"
FORMAT = 1


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.pt"


@dataclass(frozen=True)
class Entry:
    """The size and the digest of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The fields of a manifest."""

    thinwire: str
    """The version of thinwire that wrote it."""
    step: int
    optimizer: str
    """The name of the optimizer's class; with "with thinwire.compress" if a compression averages its gradients."""
    world_size: int
    nodes: tuple[tuple[int, ...], ...]
    bucket_mb: float | None
    files: dict[str, Entry]
    """The file of the model and those of all ranks, including files on other machines."""

    def common(self) -> dict[str, Any]:
        """The fields that are the same on all machines. Each writes its own model file, whose buffers may differ."""
        fields = asdict(self)
        del fields["files"][MODEL]
        return fields

    def encode(self) -> bytes:
        """The contents of the file."""
        return _with_digest({"format": FORMAT, **asdict(self)})


def decode(raw: bytes) -> Manifest:
    """Read a manifest from an untrusted source.

    Raises:
        ValueError: describing what is wrong with it.
        RecursionError: if it is nested too deeply.
    """
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(fields, dict) or "format" not in fields:
        raise ValueError("is not the manifest of a checkpoint")
    if not is_integer(fields["format"], FORMAT, FORMAT):
        raise ValueError(f"is of format {fields['format']!r:.40}, this version of thinwire reads {FORMAT}")
    fields.pop("sha256", None)
    if _with_digest(fields) != raw:
        raise ValueError("has been altered: its SHA-256 does not match its contents")
    del fields["format"]
    return _checked(fields)


def _with_digest(fields: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    return (json.dumps({**fields, "sha256": digest}, indent=1) + "\n").encode()


def _checked(fields: dict[str, Any]) -> Manifest:
    expected = set(Manifest.__dataclass_fields__)
    if fields.keys() != expected:
        raise ValueError(f"has the entries {sorted(fields)}, expected {sorted(expected)}")
    for name in ("thinwire", "optimizer"):
        _require(isinstance(fields[name], str), name, fields[name])
    _require(is_integer(fields["step"], 0, INT64_MAX), "step", fields["step"])
    world_size, nodes, bucket_mb, files = (fields[n] for n in ("world_size", "nodes", "bucket_mb", "files"))
    _require(is_integer(world_size, 1, INT64_MAX), "world_size", world_size)
    # Compare world_size with the number of files before looping over it: it may be any number.
    _require(isinstance(files, dict) and len(files) == world_size + 1, "files", files)
    for name in (MODEL, *map(rank_file, range(world_size))):
        _require(name in files and _is_entry(files[name]), f"files[{name!r}]", files.get(name))
    _require(_is_grid(nodes, world_size), "nodes", nodes)
    _require(bucket_mb is None or _is_size(bucket_mb), "bucket_mb", bucket_mb)
    entries = {name: Entry(**entry) for name, entry in files.items()}
    return Manifest(**{**fields, "nodes": tuple(map(tuple, nodes)), "files": entries})


def _require(holds: bool, name: str, value: object) -> None:
    if not holds:
        raise ValueError(f"has a wrong entry: {name} = {value!r:.80}")


def _is_entry(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"size", "sha256"}
        and is_integer(entry["size"], 0, INT64_MAX)
        and isinstance(entry["sha256"], str)
        and re.fullmatch("[0-9a-f]{64}", entry["sha256"]) is not None
    )


def _is_grid(nodes: object, world_size: int) -> bool:
    """Whether `nodes` contains every rank once, with equally many ranks per node."""
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, list) for node in nodes):
        return False
    ranks = [rank for node in nodes for rank in node]
    return (
        len({len(node) for node in nodes}) == 1
        and all(is_integer(rank, 0, world_size - 1) for rank in ranks)
        and sorted(ranks) == list(range(world_size))
    )


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= INT64_MAX
