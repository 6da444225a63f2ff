"""Downloads of files from the first mirror that has them.

A file is received into memory, checked, and only then written under its name, atomically.
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


def fetch_files(
    wanted: dict[str, int],
    folder: Path,
    mirrors: Sequence[str],
    check: Callable[[bytes, str, str], object],
    timeout_seconds: float = 5.0,
) -> list[str]:
    """Download files into ``folder``, each from the first mirror that delivers it correctly.

    ``wanted`` maps file names to their largest sizes in bytes. ``mirrors`` are base URLs, tried in
    order; one that fails is not used again. ``check(content, name, url)`` raises ValueError to
    reject a file. ``timeout_seconds`` limits connecting and each wait for data. Proxies are taken
    from the environment.

    Returns one line for each mirror that failed, and stops at the first file that no mirror
    delivers. Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for name, max_bytes in wanted.items():
        for mirror in (m for m in mirrors if m not in failed):
            url = mirror.rstrip("/") + "/" + name
            try:
                content = _receive(url, max_bytes, timeout_seconds)
                check(content, name, url)
            except ValueError as error:
                failed[mirror] = str(error)
                continue
            with files.atomic_write(folder / name) as file:
                file.write(content)
            break
        else:
            break
    return list(failed.values())


def _receive(url: str, max_bytes: int, timeout_seconds: float) -> bytes:
    """Return a file's content; raise ValueError with the URL if the mirror does not deliver it."""
    request = urllib.request.Request(url, headers={"User-Agent": "gluonpar"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            return _read(response, url, max_bytes)
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"{url}: HTTP status {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise ValueError(f"{url}: {reason}") from error


def _read(response: http.client.HTTPResponse, url: str, max_bytes: int) -> bytes:
    from tqdm import tqdm  # here, because `import gluonpar` must cost no more than MXNet

    length = response.headers.get("Content-Length", "")
    expected = int(length) if length.isdecimal() else None
    if not sys.stderr.isatty():
        print(f"downloading {url}", file=sys.stderr)
    received = bytearray()
    with tqdm(total=expected, desc=url, unit="B", unit_scale=True, disable=None) as bar:
        for block in iter(lambda: response.read(_BLOCK_BYTES), b""):
            received += block
            bar.update(len(block))
            if len(received) > max_bytes:
                raise ValueError(f"{url}: sends more than the {max_bytes} bytes the file can have")
    # read(n) does not report a connection that was cut early.
    if expected is not None and len(received) != expected:
        raise ValueError(f"{url}: cut off after {len(received)} of {expected} bytes")
    return bytes(received)
