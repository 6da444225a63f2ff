"""The four files of Fashion-MNIST: their checksums, their format IDX, and how they are read.

Xiao, Rasul and Vollgraf 2017, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms". There are two editions: the authors replaced duplicate samples five days after
the first (zalandoresearch/fashion-mnist, pull request 45). Debian and most frameworks have the
later one; MXNet's own ``FashionMNIST`` requires the earlier. Both are accepted, but not a mixture:
training samples of one may be test samples of the other.

An IDX file is a four-byte magic number, the dimensions and the bytes, and may be gzip-compressed:

    00 00 08 03 | 00 00 ea 60 | 00 00 00 1c | 00 00 00 1c | pixels ...
    uint8, 3-d    60000         28            28

The magic number's third byte is the element type (08: unsigned byte, the only one here), its fourth
the number of dimensions. After LeCun, Cortes and Burges, "The MNIST database of handwritten
digits".
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, NamedTuple

import numpy as np

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
STEMS = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)


class Edition(NamedTuple):
    """A published state of the four files, with a checksum by stem.

    It is the uncompressed content's SHA-256 or, where only that is known, the .gz file's SHA-1.
    """

    date: str
    checksums: Mapping[str, str]


CURRENT = Edition(
    "2017-08-31",
    {
        TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        TEST_IMAGES: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        TEST_LABELS: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)
MXNETS = Edition(
    "2017-08-26",
    {
        TRAIN_IMAGES: "0cf37b0d40ed5169c6b3aba31069a9770ac9043d",
        TRAIN_LABELS: "236021d52f1e40852b06a4c3008d8de8aef1e40b",
        TEST_IMAGES: "626ed6a7c06dd17c0eec72fa3be1740f146a2863",
        TEST_LABELS: "17f9ab60e7257a1620f4ad76bbbaf857c3920701",
    },
)


@dataclass(frozen=True)
class Files:
    """The four files' sizes, editions and sources; the defaults are Fashion-MNIST's.

    Downloads must be of the first edition. (MXNet's own server has the second.)
    """

    num_train: int = 60000
    num_test: int = 10000
    side: int = 28
    num_classes: int = 10
    editions: tuple[Edition, ...] = (CURRENT, MXNETS)
    debian: Path = Path("/usr/share/datasets/fashion-mnist")
    mirrors: tuple[str, ...] = (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
    )
    timeout_seconds: float = 5.0

    def shape(self, stem: str) -> tuple[int, ...]:
        """Return the dimensions that the file of this stem must have."""
        count = self.num_train if stem in (TRAIN_IMAGES, TRAIN_LABELS) else self.num_test
        return (count, self.side, self.side) if "images" in stem else (count,)


FASHION_MNIST = Files()


def path_of(folder: Path, stem: str) -> Path | None:
    """Return the file of this stem, preferably the .gz; None if the folder has neither."""
    candidates = (folder / f"{stem}.gz", folder / stem)
    return next((path for path in candidates if os.path.isfile(path)), None)


def missing(folder: Path) -> list[str]:
    """Return the stems of which a folder has neither the .gz nor the plain file."""
    return [stem for stem in STEMS if path_of(folder, stem) is None]


def read_folder(
    folder: Path, files: Files = FASHION_MNIST
) -> tuple[dict[str, np.ndarray], Edition]:
    """Return the four arrays by stem, uint8 and read-only, and their edition.

    Raises FileNotFoundError if the folder has not all four files, as .gz or plain; ValueError, with
    the remedy, for a wrong or damaged file and for files of different editions.
    """
    arrays, editions = {}, {}
    for stem in STEMS:
        path = path_of(folder, stem)
        if path is None:
            raise FileNotFoundError(f"{folder}: has neither {stem}.gz nor {stem}")
        try:
            with open(path, "rb") as file:
                raw = file.read(max_file_bytes(files.shape(stem)) + 1)
            arrays[stem], editions[path.name] = check(raw, stem, str(path), files)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{error}. Delete the file and get it again") from error
    if len({edition.date for edition in editions.values()}) > 1:
        found = ", ".join(f"{name} of {edition.date}" for name, edition in editions.items())
        raise ValueError(
            f"{folder}: files of different editions: {found}; expected four of one. Delete them "
            "and get all four again"
        )
    return arrays, next(iter(editions.values()))


def check(raw: bytes, stem: str, name: str, files: Files) -> tuple[np.ndarray, Edition]:
    """Return the array in a file's bytes, and the file's edition.

    Raises ValueError, which begins with ``name``, for damage, wrong dimensions, labels out of range
    and an unknown checksum.
    """
    shape = files.shape(stem)
    most = max_file_bytes(shape)
    if len(raw) > most:
        raise ValueError(f"{name}: too large: dimensions {shape} need at most {most} bytes")
    content = unpack(raw, shape, name)
    array = decode(content, shape, name)
    largest = files.num_classes - 1
    if "labels" in stem and array.size and array.max() > largest:
        at = int(np.argmax(array > largest))
        raise ValueError(f"{name}: label {array[at]} at index {at}; expected 0 to {largest}")
    sha256, sha1 = hashlib.sha256(content).hexdigest(), hashlib.sha1(raw).hexdigest()
    for edition in files.editions:
        if edition.checksums[stem] in (sha256, sha1):
            return array, edition
    expected = " or ".join(f"{e.checksums[stem]} ({e.date})" for e in files.editions)
    raise ValueError(
        f"{name}: wrong checksum: the content's SHA-256 is {sha256} and the file's SHA-1 {sha1}; "
        f"expected {expected}"
    )


def _num_bytes(shape: tuple[int, ...]) -> int:
    return 4 + 4 * len(shape) + math.prod(shape)


def max_file_bytes(shape: tuple[int, ...]) -> int:
    """Return the largest size of a file of this shape, compressed or not, in bytes."""
    size = _num_bytes(shape)
    return size + size // 1024 + 4096  # gzip may add its frame, a name, and 5 bytes per 16 KiB


def unpack(raw: bytes, shape: tuple[int, ...], name: str) -> bytes:
    """Return the IDX content of a file's bytes, decompressed if they are gzip.

    Decompresses at most one byte more than ``shape`` needs, so a gzip bomb does no harm.
    """
    if raw[:2] != b"\x1f\x8b":
        return raw
    size, stream = _num_bytes(shape), zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        content = stream.decompress(raw, size + 1)
    except zlib.error as error:
        raise ValueError(f"{name}: damaged gzip ({error}); expected {size} bytes of IDX") from error
    if len(content) > size:
        raise ValueError(f"{name}: the gzip holds more than the {size} bytes expected of {shape}")
    if not stream.eof:
        raise ValueError(f"{name}: truncated gzip of {len(content)} bytes of IDX; expected {size}")
    extra = len(stream.unused_data)
    if extra:
        raise ValueError(f"{name}: {extra} bytes of trailing garbage after the gzip stream")
    return content


def decode(content: bytes, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return the array in an uncompressed IDX file: uint8, a read-only view of ``content``.

    Allocates nothing by the sizes in the file's header.

    >>> decode(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), (2,), "labels")
    array([5, 7], dtype=uint8)
    """
    header = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
    if len(content) >= 4 and content[:4] != header[:4]:
        magic = f"{content[:4].hex()}; expected {header[:4].hex()}"
        raise ValueError(f"{name}: wrong magic number {magic} ({len(shape)} dimensions of bytes)")
    if len(content) >= len(header) and not content.startswith(header):
        found = struct.unpack(f">{len(shape)}I", content[4 : len(header)])
        raise ValueError(f"{name}: its header has dimensions {found}; expected {tuple(shape)}")
    extra = len(content) - _num_bytes(shape)
    if extra:
        what = f"truncated by {-extra} bytes" if extra < 0 else f"{extra} bytes of trailing garbage"
        sizes = f"{len(content)} bytes of IDX; expected {_num_bytes(shape)}"
        raise ValueError(f"{name}: {what}: {sizes}")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
