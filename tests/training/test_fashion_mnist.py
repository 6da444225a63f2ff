"""Fashion-MNIST: the folders searched, downloads from mirrors on 127.0.0.1, and damaged files."""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import threading

import pytest

from gluonpar.training.data import fashion_mnist
from gluonpar.training.data.fashion_mnist import find, folders, read_folder
from tests.support.idx_files import contents, describe_tiny, encode, gz, write

BODIES = {f"{stem}.gz": gz(content) for stem, content in contents().items()}
FIRST, SECOND, THIRD, FOURTH = BODIES


@contextlib.contextmanager
def mirror(faults=None):
    """Serve the tiny files; ``faults`` maps a name to 404, cut, wrong, stall or unsized.

    Gives the address and the list of the names that are requested.
    """
    requested, release = [], threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.rsplit("/", 1)[-1]
            requested.append(name)
            fault, body = (faults or {}).get(name), BODIES[name]
            if fault == "404":
                self.send_error(404)
                return
            self.send_response(200)
            if fault != "unsized":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if fault == "stall":
                release.wait(600)
            body = b"x" * len(body) if fault == "wrong" else body
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[: len(body) // 2] if fault in ("cut", "stall") else body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/folder", requested
    finally:
        release.set()
        server.shutdown()
        thread.join()
        server.server_close()


def by_stem(arrays):
    """The contents of the files that these arrays are written to."""
    return dict(zip(contents(), map(encode, arrays)))


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    """The folder of MXNet's data sets, which does not exist yet; the tiny files are expected."""
    describe_tiny(monkeypatch, tmp_path)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "datasets"


@pytest.fixture
def downloads(datasets):
    return datasets / "fashion-mnist-2017-08-31"


@pytest.fixture
def debian(tmp_path):
    return tmp_path / "debian"


def download(downloads, monkeypatch, *mirrors):
    """Find the files; return the lines about mirrors if they are not found."""
    monkeypatch.setattr(fashion_mnist, "MIRRORS", mirrors)
    try:
        _, source = find()
    except FileNotFoundError as error:
        lines = [line[4:] for line in str(error).splitlines() if line.startswith("  - ")]
        return [line for line in lines if line.startswith("http")]
    assert source == f"{downloads} (downloaded)"
    assert {name: (downloads / name).read_bytes() for name in os.listdir(downloads)} == BODIES
    return []


def test_the_order_of_the_folders(tmp_path, datasets, downloads, debian, monkeypatch):
    for folder, description in (
        (downloads, "downloaded"),
        (debian, "Debian's dataset-fashion-mnist"),
        (datasets / "fashion-mnist", "MXNet's cache"),
    ):
        write(folder, contents())
        arrays, source = find()
        assert source == f"{folder} ({description})"
        assert by_stem(arrays) == contents()
    given = write(tmp_path / "given", contents(1))
    assert find(given)[1] == f"{given} (data_dir)"
    monkeypatch.delenv("MXNET_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert next(iter(folders())) == tmp_path / ".mxnet" / "datasets" / "fashion-mnist"


def test_an_incomplete_folder_is_skipped_and_a_damaged_one_is_not(datasets, debian):
    cache = write(datasets / "fashion-mnist", contents())
    write(debian, contents())
    path = cache / FOURTH
    path.write_bytes(BODIES[FOURTH][:-13])
    with pytest.raises(ValueError, match=f"^{path}: .*Delete the file"):
        find()
    path.unlink()
    assert find()[1].startswith(str(debian))


def test_data_that_are_not_found_list_every_folder_and_mirror_and_the_alternatives(
    datasets, debian, monkeypatch
):
    (write(datasets / "fashion-mnist", contents()) / FIRST).unlink()
    debian.write_text("")
    with mirror({FIRST: "404"}) as (first, _), mirror({FIRST: "404"}) as (second, _):
        monkeypatch.setattr(fashion_mnist, "MIRRORS", (first, second))
        with pytest.raises(FileNotFoundError) as caught:
            find()
    message = str(caught.value)
    for line in (
        f"{datasets / 'fashion-mnist'} (MXNet's cache): lacks {FIRST}\n",
        f"{debian} (Debian's dataset-fashion-mnist): lacks {', '.join(BODIES)}\n",
        f"{first}/{FIRST}: 404",
        f"{second}/{FIRST}: 404",
    ):
        assert f"\n  - {line}" in message
    for alternative in ("data_dir", "install dataset-fashion-mnist", "--dataset synthetic"):
        assert alternative in message


def test_data_dir_is_the_only_folder_and_needs_no_network(tmp_path, debian, monkeypatch):
    write(debian, contents())
    monkeypatch.setattr(fashion_mnist, "_download", None)
    with pytest.raises(FileNotFoundError, match=r"given \(data_dir\): lacks") as caught:
        find(tmp_path / "given")
    assert str(debian) not in str(caught.value)


FAULTS = {"404": "404", "cut": "", "wrong": "hash", "stall": "timed out"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_mirror_is_reported_once_and_the_next_one_replaces_it(downloads, fault, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "TIMEOUT_SECONDS", 1 if fault == "stall" else 60)
    with mirror({SECOND: fault, THIRD: fault}) as (bad, requested):
        (failure,) = download(downloads, monkeypatch, bad)
        assert failure.startswith(f"{bad}/{SECOND}: ") and FAULTS[fault] in failure
        assert requested == [FIRST, SECOND]
        assert os.listdir(downloads) == [FIRST]  # nothing of the file that was not complete
        with mirror({SECOND: "unsized"}) as (good, requested_of_good):
            assert download(downloads, monkeypatch, bad, good) == []
        assert requested == [FIRST, SECOND, SECOND]
        assert requested_of_good == [SECOND, THIRD, FOURTH]
        assert download(downloads, monkeypatch, good) == []  # whose server has ended
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in downloads.iterdir())


def test_damage_is_an_error_that_names_the_file_or_harmless(tmp_path):
    """Each bit in turn is flipped, and the file is cut off at each length."""
    path, raw = write(tmp_path / "data", contents()) / FOURTH, BODIES[FOURTH]
    damaged = [raw[:length] for length in range(len(raw))]
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for content in damaged:
        path.write_bytes(content)
        try:
            arrays = read_folder(path.parent)
        except ValueError as error:
            assert re.match(f"{path}: .*Delete the file and get it again$", str(error), re.DOTALL)
        else:
            assert by_stem(arrays) == contents()


@pytest.mark.parametrize("content", [b"", b"\0\0\x08", b"\0\0\x08\3\0\0", b"\0\0\x08\1\0\0\0\2\5"])
def test_a_file_of_another_format_or_length_is_refused(tmp_path, content):
    path = write(tmp_path / "data", contents()) / SECOND
    path.write_bytes(gz(content))
    with pytest.raises(ValueError, match=f"^{path}: .*Delete the file"):
        read_folder(path.parent)
