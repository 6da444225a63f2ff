"""Tiny stand-ins for the four files, written by an encoder of the tests' own."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np

from gluonpar.training.data import fashion_mnist

STEMS = tuple(fashion_mnist.PUBLISHED)


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


def gz(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        (folder / f"{stem}.gz").write_bytes(gz(content))
    return folder


def describe_tiny(monkeypatch, tmp_path: Path) -> None:
    """Have the checksums of `contents()` be published; no mirrors."""
    published = {
        stem: hashlib.sha256(gz(content)).hexdigest() for stem, content in contents().items()
    }
    values = {"PUBLISHED": published, "DEBIAN": tmp_path / "debian", "MIRRORS": ()}
    for name, value in values.items():
        monkeypatch.setattr(fashion_mnist, name, value)
