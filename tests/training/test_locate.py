"""The folders in which the data are looked for: their order, and which are skipped."""

from __future__ import annotations

import pytest
from idx_files import contents, encode, gz, tiny, write
from test_download import Mirror, no_proxy  # noqa: F401

from gluonpar.training.data.fashion_mnist import STEMS, TEST_LABELS
from gluonpar.training.data.locate import find, folders


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "datasets"


def test_mxnets_cache_is_where_mxnet_has_it(tmp_path, monkeypatch):
    assert next(iter(folders())) == tmp_path / "home" / "datasets" / "fashion-mnist"
    monkeypatch.delenv("MXNET_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert next(iter(folders())) == tmp_path / ".mxnet" / "datasets" / "fashion-mnist"


def test_the_order_of_the_folders(tmp_path, home):
    files = tiny(tmp_path)
    expected = []
    for folder, what in (
        (home / "fashion-mnist-2017-08-31", "downloaded"),
        (files.debian, "Debian's dataset-fashion-mnist"),
        (home / "fashion-mnist", "MXNet's cache"),
    ):
        write(folder, contents())
        expected.append(f"{folder} ({what}, edition of 2017-08-31)")
        arrays, source = find(files=files)
        assert source == expected[-1]
        assert {stem: encode(array) for stem, array in arrays.items()} == contents()
    given = write(tmp_path / "given", contents(1))
    assert find(given, files)[1] == f"{given} (data_dir, edition of 2017-08-26)"


def test_an_incomplete_folder_is_skipped_and_a_damaged_one_is_not(tmp_path, home):
    files = tiny(tmp_path)
    cache = write(home / "fashion-mnist", contents())
    write(files.debian, contents())
    path = cache / f"{TEST_LABELS}.gz"
    path.write_bytes(gz(contents()[TEST_LABELS])[:-3])
    with pytest.raises(ValueError, match=f"^{path}: truncated gzip.*Delete the file"):
        find(files=files)
    path.unlink()
    assert find(files=files)[1].startswith(str(files.debian))


def test_data_dir_is_the_only_folder(tmp_path):
    with Mirror() as mirror:
        files = tiny(tmp_path, mirrors=(mirror.url,))
        write(files.debian, contents())
        given = write(tmp_path / "given", {STEMS[0]: contents()[STEMS[0]]})
        with pytest.raises(FileNotFoundError) as caught:
            find(given, files)
        assert mirror.asked == []
    lacking = ", ".join(f"{stem}[.gz]" for stem in STEMS[1:])
    assert f"{given} (data_dir): lacks {lacking}\n" in str(caught.value)
    assert str(files.debian) not in str(caught.value)


@pytest.mark.parametrize("kind", ["no such folder", "not a folder"])
def test_a_data_dir_that_is_not_a_folder(tmp_path, kind):
    given = tmp_path / "given"
    if kind == "not a folder":
        given.write_text("")
    with pytest.raises(FileNotFoundError, match=f"given \\(data_dir\\): {kind}"):
        find(given, tiny(tmp_path))


def test_data_that_are_not_found_list_every_folder_with_the_reason_and_the_alternatives(
    tmp_path, home
):
    write(home / "fashion-mnist", {STEMS[0]: contents()[STEMS[0]]})
    (tmp_path / "debian").write_text("")
    missing = {f"{STEMS[0]}.gz": "404"}
    with Mirror(missing) as first, Mirror(missing) as second:
        files = tiny(tmp_path, mirrors=(first.url, second.url))
        with pytest.raises(FileNotFoundError) as caught:
            find(files=files)
    message = str(caught.value)
    lacking = ", ".join(f"{stem}[.gz]" for stem in STEMS[1:])
    for line in (
        f"  - {home / 'fashion-mnist'} (MXNet's cache): lacks {lacking}",
        f"  - {files.debian} (Debian's dataset-fashion-mnist): not a folder",
        f"  - {first.url}/{STEMS[0]}.gz: HTTP status 404 Not Found",
        f"  - {second.url}/{STEMS[0]}.gz: HTTP status 404 Not Found",
    ):
        assert line in message.splitlines()
    for way in ("--data-dir", "apt-get install dataset-fashion-mnist", "--dataset synthetic"):
        assert way in message
