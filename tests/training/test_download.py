"""Mirrors on 127.0.0.1: whatever they do, only complete and correct files get their name."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import threading

import pytest
from idx_files import contents, gz, tiny, write

from gluonpar.training.data.fashion_mnist import STEMS
from gluonpar.training.data.locate import find, folders

BODIES = {f"{stem}.gz": gz(content) for stem, content in contents().items()}
NAMES = [f"{stem}.gz" for stem in STEMS]
FIRST, SECOND, THIRD, FOURTH = NAMES


class Mirror:
    """A server of the tiny files whose `behave` maps a file name to what it does: 404, cut ..."""

    def __init__(self, behave: dict[str, str] | None = None, seed: int = 0) -> None:
        self.behave = behave or {}
        self.bodies = {f"{stem}.gz": gz(content) for stem, content in contents(seed).items()}
        self.asked: list[str] = []
        self.release = threading.Event()
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rsplit("/", 1)[-1]
                mirror.asked.append(name)
                mirror.answer(self, mirror.behave.get(name, "ok"), mirror.bodies[name])

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/folder"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def answer(self, handler: http.server.BaseHTTPRequestHandler, what: str, body: bytes) -> None:
        if what == "404":
            handler.send_error(404)
            return
        body = {"wrong": b"x" * len(body), "long": body + bytes(200_000)}.get(what, body)
        handler.send_response(200)
        if what != "unsized":
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if what == "stall":
            self.release.wait(600)
        # A mirror that sends too much is left before it is done.
        with contextlib.suppress(ConnectionError):
            handler.wfile.write(body[: len(body) // 2] if what in ("cut", "stall") else body)

    def __enter__(self) -> Mirror:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def refusing():
    """A URL at which nothing listens: the port is held, and not listened on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder for downloads, which does not exist yet."""
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "home"))
    return list(folders(tiny(tmp_path)))[-1]


def fetch(folder, *mirrors, **options):
    """Find the files; return the lines about mirrors if they are not found."""
    tmp_path = folder.parents[2]
    try:
        _, source = find(files=tiny(tmp_path, mirrors=mirrors, **options))
    except FileNotFoundError as error:
        lines = [line[4:] for line in str(error).splitlines() if line.startswith("  - ")]
        return [line for line in lines if not line.startswith("/")]  # those are about folders
    assert source.startswith(f"{folder} (downloaded")
    assert all((folder / name).read_bytes() == BODIES[name] for name in NAMES)
    return []


def test_a_good_mirror_gives_all(folder, capsys):
    with Mirror({SECOND: "unsized"}) as mirror:
        assert fetch(folder, mirror.url + "/") == []
        assert f"downloading {mirror.url}/{FIRST}" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == sorted(NAMES)


SIZE = len(BODIES[SECOND])
BAD = {
    "wrong": "wrong magic number",
    "404": "HTTP status 404 Not Found",
    "cut": f"cut off after {SIZE // 2} of {SIZE} bytes",
    "long": "larger than the 4110 bytes",
}


@pytest.mark.parametrize("what", BAD)
def test_the_next_mirror_replaces_a_bad_one_which_is_not_used_again(folder, what):
    with Mirror({SECOND: what}) as bad, Mirror() as good:
        assert fetch(folder, bad.url, good.url) == []
        assert bad.asked == [FIRST, SECOND]
        assert good.asked == [SECOND, THIRD, FOURTH]
    assert sorted(os.listdir(folder)) == sorted(NAMES)


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_reported_once_and_complete_files_stay(folder, what):
    with Mirror({THIRD: what, SECOND: what}) as mirror:
        (failure,) = fetch(folder, mirror.url)
        assert failure.startswith(f"{mirror.url}/{SECOND}: {BAD[what]}")
        assert mirror.asked == [FIRST, SECOND]
    assert os.listdir(folder) == [FIRST]


def test_a_refused_connection_is_reported_once(folder, refusing):
    (failure,) = fetch(folder, refusing)
    assert failure.startswith(f"{refusing}/{FIRST}: ")
    assert "refused" in failure
    with Mirror() as good:
        assert fetch(folder, refusing, good.url) == []


def test_a_mirror_that_stalls_is_given_up(folder):
    with Mirror({FIRST: "stall"}) as slow:
        (failure,) = fetch(folder, slow.url, timeout_seconds=0.2)
    assert failure == f"{slow.url}/{FIRST}: timed out"
    assert os.listdir(folder) == []


def test_a_full_disk_leaves_no_file(folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with Mirror() as mirror:
        assert "No space left on device" in fetch(folder, mirror.url)[0]
    assert os.listdir(folder) == []


def test_files_that_are_there_are_not_downloaded_again(folder):
    write(folder, {STEMS[1]: contents()[STEMS[1]]})
    with Mirror() as mirror:
        for _ in range(2):
            assert fetch(folder, mirror.url) == []
        assert mirror.asked == [FIRST, THIRD, FOURTH]
    assert os.listdir(folder.parent) == ["fashion-mnist-2017-08-31"]
    assert len(os.listdir(folder)) == 4


def test_a_mirror_of_another_edition_is_refused(folder):
    with Mirror(seed=1) as mirror:
        (failure,) = fetch(folder, mirror.url)
    assert failure.startswith(f"{mirror.url}/{FIRST}: wrong checksum")
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_written_is_reported(folder):
    folder.parents[1].write_text("")
    with Mirror() as mirror:
        assert "cannot be written: " in fetch(folder, mirror.url)[0]
