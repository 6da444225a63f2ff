"""Fashion-MNIST: where its four files are found, their download, and their format, IDX.

Xiao, Rasul and Vollgraf 2017, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms". Each file is an IDX file, compressed by gzip, whose CRC-32 detects damage. An
IDX file is a four-byte magic number, the dimensions and the bytes. The magic number's third byte is
the type of the elements, its fourth the number of dimensions:

    00 00 08 03 | 00 00 ea 60 | 00 00 00 1c | 00 00 00 1c | pixels ...
    uint8, 3-d    60000         28            28

After LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from pathlib import Path

import numpy as np

# The files' names without .gz, and the SHA-256 of the mirrors' .gz files.
PUBLISHED = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)
TIMEOUT_SECONDS = 5.0
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def folders() -> dict[Path, str]:
    """Return the folders that are searched, in this order, each with its description.

    MXNet's folder for data sets is $MXNET_HOME/datasets, or ~/.mxnet/datasets.
    """
    home = os.environ.get("MXNET_HOME") or os.path.join("~", ".mxnet")
    cache = Path(os.path.expanduser(home)) / "datasets"
    return {
        cache / "fashion-mnist": "MXNet's cache",
        DEBIAN: "Debian's dataset-fashion-mnist",
        # Not in MXNet's own folder, where MXNet would replace the files by an earlier edition.
        cache / "fashion-mnist-2017-08-31": "downloaded",
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
        if description == "downloaded":
            tried += _download(folder)
        lacking = ", ".join(f"{stem}.gz" for stem in missing(folder))
        if not lacking:
            return read_folder(folder), f"{folder} ({description})"
        tried.append(f"{folder} ({description}): lacks {lacking}")
    lines = "\n  - ".join(tried)
    raise FileNotFoundError(
        f"Fashion-MNIST was not found. Tried:\n  - {lines}\nEither put its four files "
        "into one folder and give that as data_dir, or install Debian's package: apt-get install "
        "dataset-fashion-mnist. For a run without real data: --dataset synthetic."
    )


def missing(folder: Path) -> list[str]:
    """Return the names, without .gz, of the files that a folder lacks."""
    return [stem for stem in PUBLISHED if not (folder / f"{stem}.gz").is_file()]


def _download(folder: Path) -> list[str]:
    """Download the files that are missing; return a line for each mirror that failed.

    pooch gives a file its name only when its checksum is right.
    """
    import pooch  # here, because `import gluonpar` must cost no more than MXNet

    shows = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    get, failed = pooch.HTTPDownloader(shows, timeout=TIMEOUT_SECONDS), []
    for mirror in MIRRORS:
        try:
            for stem in missing(folder):
                url, checksum = f"{mirror}/{stem}.gz", f"sha256:{PUBLISHED[stem]}"
                path = pooch.retrieve(url, checksum, f"{stem}.gz", folder, downloader=get)
                os.chmod(path, 0o644)  # pooch lets its owner alone read it
        except (OSError, ValueError) as error:
            failed.append(f"{url}: {error}")
    return failed


def read_folder(folder: Path) -> list[np.ndarray]:
    """Return the four arrays, uint8 and read-only, of a folder that has all files.

    Raises ValueError, with the file and the remedy, if one is damaged.
    """
    arrays = []
    for path in (folder / f"{stem}.gz" for stem in PUBLISHED):
        try:
            arrays.append(decode(gzip.decompress(path.read_bytes())))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise ValueError(f"{path}: {error}. Delete the file and get it again") from error
    return arrays


def decode(content: bytes) -> np.ndarray:
    """Return the array in an IDX file's content: uint8, a read-only view of it.

    Raises ValueError if the content has another length than its dimensions say.

    >>> decode(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]))
    array([5, 7], dtype=uint8)
    """
    num_dimensions = int(np.frombuffer(content, np.uint8, count=4)[3])
    shape = np.frombuffer(content, ">u4", count=num_dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)
