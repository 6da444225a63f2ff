"""Tiny stand-ins for the four files, written by an encoder of the tests' own."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

from gluonpar.training.data.fashion_mnist import STEMS, Edition, Files


def encode(array: np.ndarray) -> bytes:
    """An IDX file's bytes, after the format's description and not after the reader."""
    header = struct.pack(">HBB", 0, 8, array.ndim)
    return header + b"".join(struct.pack(">I", n) for n in array.shape) + array.tobytes()


def contents(seed: int = 0, num_train: int = 6, num_test: int = 4) -> dict[str, bytes]:
    """The IDX content of four files by stem: 6 training and 4 test images of 28 x 28."""
    rng = np.random.RandomState(seed)
    arrays = []
    for count in (num_train, num_test):
        arrays.append(rng.randint(0, 256, size=(count, 28, 28)).astype(np.uint8))
        arrays.append(rng.randint(0, 10, size=count).astype(np.uint8))
    return {stem: encode(array) for stem, array in zip(STEMS, arrays)}


def edition(date: str, files: dict[str, bytes]) -> Edition:
    """An edition known by the SHA-256 of the contents."""
    return Edition(date, {stem: hashlib.sha256(raw).hexdigest() for stem, raw in files.items()})


def gz(content: bytes) -> bytes:
    """Gzip with no time stamp."""
    return gzip.compress(content, mtime=0)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Put contents into a folder as .gz files."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        (folder / f"{stem}.gz").write_bytes(gz(content))
    return folder


def tiny(tmp_path: Path, **changes: object) -> Files:
    """A description of `contents()` and, as MXNet's edition, of `contents(1)`; no mirrors."""
    editions = (edition("2017-08-31", contents()), edition("2017-08-26", contents(1)))
    published = {stem: hashlib.sha256(gz(raw)).hexdigest() for stem, raw in contents().items()}
    values = dict(editions=editions, published=published, debian=tmp_path / "debian", mirrors=())
    return Files(**{**values, **changes})
