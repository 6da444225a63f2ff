"""The folders in which Fashion-MNIST is looked for, in their order, and its download."""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np

from gluonpar.checkpoint.files import atomic_write
from gluonpar.training.data import fashion_mnist
from gluonpar.training.data.fashion_mnist import FASHION_MNIST, Files, missing


def folders(files: Files = FASHION_MNIST) -> dict[Path, str]:
    """Return the folders that are looked into, in their order, and what each is.

    MXNet's folder for data sets is $MXNET_HOME/datasets, or ~/.mxnet/datasets.
    """
    home = os.environ.get("MXNET_HOME") or os.path.join("~", ".mxnet")
    cache = Path(os.path.expanduser(home)) / "datasets"
    return {
        cache / "fashion-mnist": "MXNet's cache",
        files.debian: "Debian's dataset-fashion-mnist",
        # Not in MXNet's own folder, where it replaces single files of other editions by its own.
        cache / f"fashion-mnist-{files.editions[0].date}": "downloaded",
    }


def find(
    data_dir: str | os.PathLike[str] | None = None, files: Files = FASHION_MNIST
) -> tuple[dict[str, np.ndarray], str]:
    """Return the four arrays by stem, uint8 and read-only, and a description of their source.

    Looks in ``data_dir`` only, if that is given; otherwise in :func:`folders`, and downloads what
    the last of these lacks. Raises FileNotFoundError, with the reason for each folder and mirror,
    if the files are not found; ValueError if the first folder that has all four has a damaged one.
    """
    places = folders(files) if data_dir is None else {Path(data_dir): "data_dir"}
    tried = []
    for folder, what in places.items():
        lacking = missing(folder)
        if lacking and what == "downloaded":
            try:
                tried += _download(lacking, folder, files)
            except OSError as error:
                tried.append(f"downloads cannot be written: {error}")
            lacking = missing(folder)
        if not lacking:
            arrays, edition = fashion_mnist.read_folder(folder, files)
            return arrays, f"{folder} ({what}, edition of {edition.date})"
        problem = "lacks " + ", ".join(f"{stem}[.gz]" for stem in lacking)
        if not os.path.isdir(folder):
            problem = "not a folder" if os.path.exists(folder) else "no such folder"
        tried.append(f"{folder} ({what}): {problem}")
    raise FileNotFoundError(
        "Fashion-MNIST was not found. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + "Either put its four files into one folder and give that with --data-dir (data_dir=...), "
        "or install Debian's package: apt-get install dataset-fashion-mnist. "
        "For a run without real data: --dataset synthetic."
    )


def _download(stems: list[str], folder: Path, files: Files) -> list[str]:
    """Download files, each from the first mirror that has it; return a line per failed mirror.

    A mirror that fails is not used again. Stops at the first file that no mirror delivers. A file
    is received into memory, checked, and only then written under its name, atomically.
    """
    folder.mkdir(parents=True, exist_ok=True)
    published = replace(files, editions=files.editions[:1])
    failed: dict[str, str] = {}
    for stem in stems:
        for mirror in (m for m in files.mirrors if m not in failed):
            url = f"{mirror.rstrip('/')}/{stem}.gz"
            try:
                most = fashion_mnist.max_file_bytes(files.shape(stem))
                content = _receive(url, most, files.timeout_seconds)
                fashion_mnist.check(content, stem, url, published)
            except ValueError as error:
                failed[mirror] = str(error)
                continue
            with atomic_write(folder / f"{stem}.gz") as file:
                file.write(content)
            break
        else:
            break
    return list(failed.values())


def _receive(url: str, max_bytes: int, timeout_seconds: float) -> bytes:
    """Return a file's content; raise ValueError with the URL if the mirror does not deliver it."""
    from tqdm import tqdm  # here, because `import gluonpar` must cost no more than MXNet

    request = urllib.request.Request(url, headers={"User-Agent": "gluonpar"})
    received = bytearray()
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            if not sys.stderr.isatty():
                print(f"downloading {url}", file=sys.stderr)
            length = response.headers.get("Content-Length", "")
            expected = int(length) if length.isdecimal() else None
            with tqdm(total=expected, desc=url, unit="B", unit_scale=True, disable=None) as bar:
                for block in iter(lambda: response.read(1 << 16), b""):
                    received += block
                    bar.update(len(block))
                    if len(received) > max_bytes:
                        raise ValueError(f"{url}: larger than the {max_bytes} bytes allowed")
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"{url}: HTTP status {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise ValueError(f"{url}: {reason}") from error
    # read(n) does not report a connection that was cut early.
    if expected not in (None, len(received)):
        raise ValueError(f"{url}: cut off after {len(received)} of {expected} bytes")
    return bytes(received)
