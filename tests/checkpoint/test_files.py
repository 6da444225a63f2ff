"""files: a path holds a whole file, old or new, or none; checks change nothing."""

import os
import stat

import pytest

from gluonpar.checkpoint import files


def write(path, *parts):
    with files.atomic_write(path) as file:
        for part in parts:
            file.write(part)


def test_of_two_that_write_a_path_at_the_same_time_one_is_whole_and_there(tmp_path):
    path = tmp_path / "a"
    with files.atomic_write(path) as first:
        first.write(b"the first, ")
        write(path, b"the second")
        first.write(b"whole")
        first.flush()
        assert path.read_bytes() == b"the second"
    assert path.read_bytes() == b"the first, whole"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [KeyError("a bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("old", [None, b"old"])
def test_an_error_while_writing_keeps_the_old_file(tmp_path, error, old):
    path = tmp_path / "a"
    if old is not None:
        path.write_bytes(old)
    with pytest.raises(type(error)), files.atomic_write(path) as file:
        file.write(b"half")
        raise error
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([] if old is None else [old])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_refuses_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "a"
    write(path, b"old")

    def refuse(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError, match="No space left"):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_the_file_is_flushed_before_it_is_renamed_and_its_folder_after(tmp_path, monkeypatch):
    path, order = tmp_path / "a", []
    sync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        status = os.fstat(descriptor)
        order.append(("flushed", "folder" if stat.S_ISDIR(status.st_mode) else status.st_size))
        sync(descriptor)

    def note_replace(source, target):
        order.append(("renamed", os.path.getsize(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write(path, b"12345")
    assert order == [("flushed", 5), ("renamed", 5), ("flushed", "folder")]


def test_a_check_changes_nothing(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    files.check_replaceable(tmp_path / "a")
    files.check_replaceable(str(tmp_path / "new"))
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_only_a_regular_file_is_replaced(tmp_path):
    """A rename would put a file in the place of a device, for all programs of the machine."""
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            files.check_replaceable(path)
    with pytest.raises(OSError, match="not a regular file"):
        write(tmp_path / "pipe", b"new")
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe").st_mode)


@pytest.mark.parametrize("name", ["file", "file/below", os.fsdecode(b"\xff")])
def test_a_folder_in_which_nothing_can_be_saved_is_named(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=f"{tmp_path}/{name}: "):
        files.make_writable_folder(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]
