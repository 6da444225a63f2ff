"""Where Fashion-MNIST is looked for, and in which order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from gluonpar.training.data import download, idx
from gluonpar.training.data.fashion_mnist import FASHION_MNIST, Files, check, missing, read_folder


def cache_root() -> Path:
    """MXNet's folder for data sets: $MXNET_HOME/datasets, or ~/.mxnet/datasets."""
    home = os.environ.get("MXNET_HOME") or os.path.join("~", ".mxnet")
    return Path(os.path.expanduser(home)) / "datasets"


def download_folder(files: Files = FASHION_MNIST) -> Path:
    """Where downloads go: beside MXNet's own fashion-mnist, not into it.

    MXNet replaces every file there that is not of the edition it pins, one at a time as it is asked
    for the training or the test set; what is left is a mixture.
    """
    return cache_root() / f"fashion-mnist-{files.editions[0].date}"


def folders(files: Files = FASHION_MNIST) -> dict[Path, str]:
    """The folders that are looked into, in their order, and what each is."""
    return {
        cache_root() / "fashion-mnist": "MXNet's cache",
        files.debian: "Debian's dataset-fashion-mnist",
        download_folder(files): "downloaded",
    }


def find(
    data_dir: str | os.PathLike[str] | None = None, files: Files = FASHION_MNIST
) -> tuple[dict[str, np.ndarray], str]:
    """The four arrays by stem, uint8 and read-only, and where they were found, in words.

    Only in `data_dir` if that is given, and nothing is downloaded then. Otherwise in MXNet's cache,
    among our earlier downloads, in Debian's package, and then from a mirror.

    FileNotFoundError: nowhere; it lists every place and what was wrong there. ValueError: a place
    has all four files and one is not what it must be; the places after it are not tried then.
    """
    downloads = download_folder(files)
    places = folders(files) if data_dir is None else {Path(data_dir): "the folder given"}
    tried = []
    for folder, what in places.items():
        lacking = missing(folder)
        if lacking and folder == downloads:
            tried += _download(lacking, folder, files)
            lacking = missing(folder)
        if not lacking:
            arrays, edition = read_folder(folder, files)
            return arrays, f"{folder} ({what}, edition of {edition.date})"
        tried.append(f"{folder} ({what}): {_lack(folder, lacking)}")
    raise FileNotFoundError(_nowhere(tried))


def _download(lacking: list[str], folder: Path, files: Files) -> list[str]:
    """What went wrong, a line a mirror."""
    published = replace(files, editions=files.editions[:1])
    wanted = {f"{stem}.gz": idx.max_file_bytes(files.shape(stem)) for stem in lacking}
    try:
        return download.fetch_files(
            wanted,
            folder,
            files.mirrors,
            lambda raw, name, url: check(raw, name[: -len(".gz")], url, published),
            files.timeout_seconds,
        )
    except OSError as error:
        return [f"downloads cannot be written: {error}"]


def _lack(folder: Path, lacking: list[str]) -> str:
    if not os.path.exists(folder):
        return "no such folder"
    if not os.path.isdir(folder):
        return "not a folder"
    return "lacks " + ", ".join(f"{stem}[.gz]" for stem in lacking)


def _nowhere(tried: list[str]) -> str:
    places = "\n".join(f"  - {line}" for line in tried)
    return (
        f"Fashion-MNIST was not found. Tried:\n{places}\n"
        "Either put its four files into one folder and name that with --data-dir (data_dir=...), "
        "or install Debian's package: apt-get install dataset-fashion-mnist. "
        "For a run without real data: --dataset synthetic."
    )
