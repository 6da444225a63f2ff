"""The folders in which Fashion-MNIST is looked for, and their order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from gluonpar.training.data import download, idx
from gluonpar.training.data.fashion_mnist import FASHION_MNIST, Files, check, missing, read_folder


def cache_root() -> Path:
    """Return MXNet's folder for data sets: $MXNET_HOME/datasets, or ~/.mxnet/datasets."""
    home = os.environ.get("MXNET_HOME") or os.path.join("~", ".mxnet")
    return Path(os.path.expanduser(home)) / "datasets"


def download_folder(files: Files = FASHION_MNIST) -> Path:
    """Return the folder for downloads."""
    # Not MXNet's own fashion-mnist, where MXNet replaces single files of other editions by its own.
    return cache_root() / f"fashion-mnist-{files.editions[0].date}"


def folders(files: Files = FASHION_MNIST) -> dict[Path, str]:
    """Return the folders that are looked into, in their order, and what each is."""
    return {
        cache_root() / "fashion-mnist": "MXNet's cache",
        files.debian: "Debian's dataset-fashion-mnist",
        download_folder(files): "downloaded",
    }


def find(
    data_dir: str | os.PathLike[str] | None = None, files: Files = FASHION_MNIST
) -> tuple[dict[str, np.ndarray], str]:
    """Return the four arrays by stem, uint8 and read-only, and a description of their source.

    Looks in ``data_dir`` only, if that is given; otherwise in :func:`folders`, and downloads what
    the last of these lacks. Raises FileNotFoundError, with the reason for each folder and mirror,
    if the files are not found; ValueError if the first folder that has all four has a damaged one.
    """
    downloads = download_folder(files)
    places = folders(files) if data_dir is None else {Path(data_dir): "data_dir"}
    tried = []
    for folder, what in places.items():
        lacking = missing(folder)
        if lacking and folder == downloads:
            tried += _download(lacking, folder, files)
            lacking = missing(folder)
        if not lacking:
            arrays, edition = read_folder(folder, files)
            return arrays, f"{folder} ({what}, edition of {edition.date})"
        tried.append(f"{folder} ({what}): {_problem(folder, lacking)}")
    raise FileNotFoundError(
        "Fashion-MNIST was not found. Tried:\n"
        + "".join(f"  - {line}\n" for line in tried)
        + "Either put its four files into one folder and give that with --data-dir (data_dir=...), "
        "or install Debian's package: apt-get install dataset-fashion-mnist. "
        "For a run without real data: --dataset synthetic."
    )


def _download(lacking: list[str], folder: Path, files: Files) -> list[str]:
    """Download the files of these stems; return one line for each mirror that failed."""
    published = replace(files, editions=files.editions[:1])
    wanted = {f"{stem}.gz": idx.max_file_bytes(files.shape(stem)) for stem in lacking}

    def checked(content: bytes, name: str, url: str) -> None:
        check(content, name[: -len(".gz")], url, published)

    try:
        return download.fetch_files(wanted, folder, files.mirrors, checked, files.timeout_seconds)
    except OSError as error:
        return [f"downloads cannot be written: {error}"]


def _problem(folder: Path, lacking: list[str]) -> str:
    if not os.path.exists(folder):
        return "no such folder"
    if not os.path.isdir(folder):
        return "not a folder"
    return "lacks " + ", ".join(f"{stem}[.gz]" for stem in lacking)
