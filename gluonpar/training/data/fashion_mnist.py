"""Fashion-MNIST: where its four files are found, their download, checksums, and format, IDX.

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
import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

# The files' names: images and labels to train with, and to test with.
STEMS = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
# By edition, in the order of STEMS: the SHA-256 of the uncompressed content or, where only that is
# known, the SHA-1 of the .gz file.
EDITIONS = {
    "2017-08-31": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    "2017-08-26": (  # MXNet's
        "0cf37b0d40ed5169c6b3aba31069a9770ac9043d",
        "236021d52f1e40852b06a4c3008d8de8aef1e40b",
        "626ed6a7c06dd17c0eec72fa3be1740f146a2863",
        "17f9ab60e7257a1620f4ad76bbbaf857c3920701",
    ),
}
# SHA-256 of the .gz files on the mirrors, which have the later edition.
PUBLISHED = (
    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
)
MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)
TIMEOUT_SECONDS = 5.0
DEBIAN = Path("/usr/share/datasets/fashion-mnist")

_MAX_BYTES = 1 << 26  # more than any of the files decompressed; a gzip bomb ends here
_REMEDY = "Delete the file and get it again"


def folders() -> dict[Path, str]:
    """Return the folders that are searched, in this order, each with its description.

    MXNet's folder for data sets is $MXNET_HOME/datasets, or ~/.mxnet/datasets.
    """
    home = os.environ.get("MXNET_HOME") or os.path.join("~", ".mxnet")
    cache = Path(os.path.expanduser(home)) / "datasets"
    return {
        cache / "fashion-mnist": "MXNet's cache",
        DEBIAN: "Debian's dataset-fashion-mnist",
        # Not in MXNet's own folder, where MXNet replaces files of another edition.
        cache / f"fashion-mnist-{next(iter(EDITIONS))}": "downloaded",
    }


def find(data_dir: str | os.PathLike[str] | None = None) -> tuple[list[np.ndarray], str]:
    """Return the four arrays, uint8 and read-only, and a description of their source.

    Searches ``data_dir`` only, if it is given, and otherwise :func:`folders`; downloads the files
    that the last of these lacks. Raises FileNotFoundError, with the reason for each folder and
    mirror, if the files are not found; ValueError if the first folder that has all four files has a
    damaged one.
    """
    places = folders() if data_dir is None else {Path(data_dir): "data_dir"}
    tried = []
    for folder, description in places.items():
        lacking = missing(folder)
        if lacking and description == "downloaded":
            tried += _download(lacking, folder)
            lacking = missing(folder)
        if not lacking:
            arrays, edition = read_folder(folder)
            return arrays, f"{folder} ({description}, edition of {edition})"
        problem = "lacks " + ", ".join(f"{stem}[.gz]" for stem in lacking)
        if not os.path.isdir(folder):
            problem = "not a folder" if os.path.exists(folder) else "no such folder"
        tried.append(f"{folder} ({description}): {problem}")
    raise FileNotFoundError(
        "Fashion-MNIST was not found. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + "Either put its four files into one folder and give that with --data-dir (data_dir=...), "
        "or install Debian's package: apt-get install dataset-fashion-mnist. "
        "For a run without real data: --dataset synthetic."
    )


def _download(stems: list[str], folder: Path) -> list[str]:
    """Download files, each from the first mirror that has it; return a line per failed mirror.

    A mirror that fails is not used again. Stops at the first file that no mirror delivers. pooch
    gives a file its name only when its checksum is right.
    """
    import pooch  # here, because `import gluonpar` must cost no more than MXNet

    terminal = sys.stderr is not None and sys.stderr.isatty()
    progressbar = terminal and os.environ.get("TERM") != "dumb"
    get = pooch.HTTPDownloader(progressbar, timeout=TIMEOUT_SECONDS)
    failed: dict[str, str] = {}
    for stem in stems:
        name, checksum = f"{stem}.gz", f"sha256:{PUBLISHED[STEMS.index(stem)]}"
        for mirror in (m for m in MIRRORS if m not in failed):
            url = f"{mirror.rstrip('/')}/{name}"
            try:
                path = pooch.retrieve(url, checksum, name, folder, downloader=get)
            except (OSError, ValueError) as error:
                failed[mirror] = f"{url}: {error}"
                continue
            os.chmod(path, 0o644)  # pooch lets its owner alone read it
            break
        else:
            break
    return list(failed.values())


def missing(folder: Path) -> list[str]:
    """Return the stems for which a folder has neither the .gz nor the plain file."""
    return [stem for stem in STEMS if not _paths(folder, stem)]


def _paths(folder: Path, stem: str) -> list[Path]:
    return [*filter(os.path.isfile, (folder / f"{stem}.gz", folder / stem))]


def read_folder(folder: Path) -> tuple[list[np.ndarray], str]:
    """Return the four arrays, uint8 and read-only, of a folder that has all files, and the edition.

    Raises ValueError, with the remedy, for a wrong or damaged file, and for a mixture of editions.
    """
    arrays, editions = [], {}
    for i, stem in enumerate(STEMS):
        path = _paths(folder, stem)[0]
        content, editions[path.name] = _read(path, i)
        arrays.append(decode(content))
    if len({*editions.values()}) > 1:
        dates = ", ".join(f"{name} of {edition}" for name, edition in editions.items())
        raise ValueError(
            f"{folder}: files of different editions: {dates}; expected four of one. Delete them "
            "and get all four again"
        )
    return arrays, next(iter(editions.values()))


def _read(path: Path, i: int) -> tuple[bytes, str]:
    """Return the decompressed content of the file of stem i, and the edition that it belongs to."""
    try:
        raw = content = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            content = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS).decompress(raw, _MAX_BYTES)
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", f"damaged gzip ({error})")
        raise ValueError(f"{path} cannot be read: {reason}. {_REMEDY}") from error
    sha256, sha1 = hashlib.sha256(content).hexdigest(), hashlib.sha1(raw).hexdigest()
    for edition, checksums in EDITIONS.items():
        if checksums[i] in (sha256, sha1):
            return content, edition
    expected = " or ".join(f"{checksums[i]} ({date})" for date, checksums in EDITIONS.items())
    raise ValueError(
        f"{path}: wrong checksum: the content's SHA-256 is {sha256} and the file's SHA-1 {sha1}; "
        f"expected {expected}. {_REMEDY}"
    )


def decode(content: bytes) -> np.ndarray:
    """Return the array in an IDX file's content: uint8, a read-only view of it.

    >>> decode(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]))
    array([5, 7], dtype=uint8)
    """
    num_dimensions = content[3]
    shape = struct.unpack_from(f">{num_dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)
