"""Fetching files from the first mirror that has them.

A file appears under its final name only whole and checked: it is received into memory (the caller
bounds its size), checked, written to a temporary name in the same folder, fsynced and renamed.
"""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Callable, Sequence

from gluonpar.checkpoint import files

_BLOCK_BYTES = 1 << 16


class MirrorError(Exception):
    """A mirror did not give the file; the message names the URL and says why."""


def fetch_files(
    wanted: dict[str, int],
    folder: Path,
    mirrors: Sequence[str],
    check: Callable[[bytes, str, str], object],
    timeout_seconds: float = 5.0,
) -> list[str]:
    """Put each wanted file into `folder`, from the first mirror that gives it as it should be.

    Args:
        wanted: file name -> the most bytes it can have.
        folder: made if it is not there.
        mirrors: base URLs, tried in order. One that fails once is not asked for the files after.
        check: called with (bytes received, file name, URL); a ValueError refuses them.
        timeout_seconds: for connecting and for each wait on the mirror, not for the whole file.

    Returns what went wrong, a line for each mirror that failed. It stops at the first file that no
    mirror gives; whether all files are there is for the caller to look. Proxies are taken from the
    environment, as urllib does. OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for name, max_bytes in wanted.items():
        for mirror in (m for m in mirrors if m not in failed):
            url = mirror.rstrip("/") + "/" + name
            try:
                raw = _receive(url, max_bytes, timeout_seconds)
                check(raw, name, url)
            except (MirrorError, ValueError) as error:
                failed[mirror] = str(error)
                continue
            with files.atomic_write(folder / name) as file:
                file.write(raw)
            break
        else:
            break
    return list(failed.values())


def _receive(url: str, max_bytes: int, timeout_seconds: float) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "gluonpar"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            return _read_body(response, url, max_bytes)
    except urllib.error.HTTPError as error:
        error.close()
        raise MirrorError(f"{url}: HTTP status {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise MirrorError(f"{url}: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise MirrorError(f"{url}: {error or type(error).__name__}") from error


def _read_body(response: http.client.HTTPResponse, url: str, max_bytes: int) -> bytes:
    length = response.headers.get("Content-Length", "")
    num_expected = int(length) if length.isdecimal() else None
    received = bytearray()
    with _Progress(url, num_expected) as advance:
        while True:
            block = response.read(_BLOCK_BYTES)
            if not block:
                break
            received += block
            advance(len(block))
            if len(received) > max_bytes:
                raise MirrorError(f"{url}: sends more than the {max_bytes} bytes the file can have")
    # read(n) reports a connection cut early as an ordinary end.
    if num_expected is not None and len(received) != num_expected:
        raise MirrorError(f"{url}: cut off after {len(received)} of {num_expected} bytes")
    return bytes(received)


class _Progress:
    """A bar on stderr if that is a terminal, else one line a file."""

    def __init__(self, url: str, num_bytes: int | None) -> None:
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # here: importing gluonpar must not cost it

            self.bar = tqdm(total=num_bytes, desc=url, unit="B", unit_scale=True)
        else:
            print(f"downloading {url}", file=sys.stderr)

    def __enter__(self) -> Callable[[int], object]:
        return self.bar.update if self.bar is not None else lambda num_bytes: None

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.close()
