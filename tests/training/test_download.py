"""Mirrors on 127.0.0.1: whatever they do, only complete and correct files get their name."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import threading

import pytest

from gluonpar.training.data.download import fetch_files

BODY = bytes(range(256)) * 40
NAMES = ("a.gz", "b.gz", "c.gz", "d.gz")
WANTED = dict.fromkeys(NAMES, len(BODY))


def only_body(raw: bytes, name: str, url: str) -> None:
    if raw != BODY:
        raise ValueError(f"{url}: wrong checksum of {name}")


class Mirror:
    """A server whose `behave` maps a file name to what it does: 404, cut, stall ..."""

    def __init__(self, **behave: str) -> None:
        self.behave = {f"{name}.gz": what for name, what in behave.items()}
        self.asked: list[str] = []
        self.release = threading.Event()
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rsplit("/", 1)[-1]
                mirror.asked.append(name)
                mirror.answer(self, mirror.behave.get(name, "ok"))

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/folder"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def answer(self, handler: http.server.BaseHTTPRequestHandler, what: str) -> None:
        if what == "404":
            handler.send_error(404)
            return
        body = {"wrong": b"x" * len(BODY), "long": BODY * 20}.get(what, BODY)
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


def fetch(folder, *mirrors, timeout_seconds=5.0):
    return fetch_files(WANTED, folder, mirrors, only_body, timeout_seconds)


def test_a_good_mirror_gives_all(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    with Mirror(b="unsized") as mirror:
        assert fetch(folder, mirror.url + "/") == []
        assert f"downloading {mirror.url}/a.gz" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == list(NAMES)
    assert all((folder / name).read_bytes() == BODY for name in NAMES)


BAD = {
    "wrong": "{url}/b.gz: wrong checksum of b.gz",
    "404": "{url}/b.gz: HTTP status 404 Not Found",
    "cut": "{url}/b.gz: cut off after 5120 of 10240 bytes",
    "long": "{url}/b.gz: sends more than the 10240 bytes the file can have",
}


@pytest.mark.parametrize("what", BAD)
def test_the_next_mirror_replaces_a_bad_one_which_is_not_used_again(tmp_path, what):
    with Mirror(b=what) as bad, Mirror() as good:
        (failure,) = fetch(tmp_path, bad.url, good.url)
        assert failure == BAD[what].format(url=bad.url)
        assert bad.asked == ["a.gz", "b.gz"]
        assert good.asked == ["b.gz", "c.gz", "d.gz"]
    assert sorted(os.listdir(tmp_path)) == list(NAMES)
    assert all((tmp_path / name).read_bytes() == BODY for name in NAMES)


def test_a_refused_connection_is_reported_once(tmp_path, refusing):
    with Mirror() as good:
        (failure,) = fetch(tmp_path, refusing, good.url)
    assert failure.startswith(f"{refusing}/a.gz: ")
    assert "refused" in failure
    assert sorted(os.listdir(tmp_path)) == list(NAMES)


def test_a_mirror_that_stalls_is_given_up(tmp_path):
    with Mirror(a="stall") as mirror:
        assert fetch(tmp_path, mirror.url, timeout_seconds=0.2) == [f"{mirror.url}/a.gz: timed out"]
    assert os.listdir(tmp_path) == []


def test_complete_files_stay_when_a_later_one_fails(tmp_path):
    with Mirror(c="cut") as mirror:
        assert len(fetch(tmp_path, mirror.url)) == 1
        assert mirror.asked == ["a.gz", "b.gz", "c.gz"]
    assert sorted(os.listdir(tmp_path)) == ["a.gz", "b.gz"]


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with Mirror() as mirror, pytest.raises(OSError, match="No space left on device"):
        fetch(tmp_path, mirror.url)
    assert os.listdir(tmp_path) == []


def test_without_mirrors_there_is_no_file(tmp_path):
    assert fetch(tmp_path) == []
    assert os.listdir(tmp_path) == []
