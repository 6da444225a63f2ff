"""The four files: everything that can be wrong with them, and the two editions."""

from __future__ import annotations

import hashlib
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from idx_files import contents, encode, gz, tiny, write

from gluonpar.training.data.fashion_mnist import (
    MXNETS,
    STEMS,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    Edition,
    check,
    missing,
    path_of,
    read_folder,
)

REMEDY = "Delete the file and get it again"


def test_gz_and_plain_files_are_read_alike(tmp_path):
    files = tiny(tmp_path)
    write(tmp_path / "gz", contents())
    (tmp_path / "plain").mkdir()
    for stem, content in contents().items():
        (tmp_path / "plain" / stem).write_bytes(content)
    for folder in ("gz", "plain"):
        arrays, found = read_folder(tmp_path / folder, files)
        assert found.date == "2017-08-31"
        assert {stem: encode(array) for stem, array in arrays.items()} == contents()


def test_missing_names_what_has_neither_form(tmp_path):
    write(tmp_path, {stem: contents()[stem] for stem in STEMS[:2]})
    (tmp_path / STEMS[2]).write_bytes(b"")
    (tmp_path / f"{STEMS[3]}.gz").mkdir()
    assert missing(tmp_path) == [STEMS[3]]
    assert missing(tmp_path / ("a" * 300)) == list(STEMS)  # no folder can have this name
    assert path_of(tmp_path, STEMS[2]) == tmp_path / STEMS[2]


LABELS = np.array([0, 1, 2, 3, 9, 4], np.uint8)
BAD_FILES = {
    "truncated IDX": (TRAIN_LABELS, encode(LABELS)[:-2], "truncated by 2 bytes: 12 .*expected 14"),
    "truncated gzip": (TRAIN_LABELS, gz(encode(LABELS))[:-9], "truncated gzip.*expected 14"),
    "garbage": (TRAIN_LABELS, encode(LABELS) + b"abc", "3 bytes of trailing garbage.*expected 14"),
    "magic": (TRAIN_LABELS, b"<html>no</html>", "magic number 3c68746d; expected 00000801"),
    "swapped": (TRAIN_LABELS, contents()[TRAIN_IMAGES], "too large|magic number 00000803"),
    "count": (TRAIN_LABELS, encode(LABELS[:5]), r"dimensions \(5,\); expected \(6,\)"),
    "rows": (
        TRAIN_IMAGES,
        encode(np.zeros((6, 27, 28), np.uint8)),
        r"dimensions \(6, 27, 28\); expected \(6, 28, 28\)",
    ),
    "label": (TRAIN_LABELS, encode(LABELS + 1), "label 10 at index 4; expected 0 to 9"),
    "checksum": (
        TRAIN_LABELS,
        encode(LABELS),
        f"SHA-256 is {hashlib.sha256(encode(LABELS)).hexdigest()}"
        f".*expected {hashlib.sha256(contents()[TRAIN_LABELS]).hexdigest()}",
    ),
    "too large": (TRAIN_LABELS, bytes(10_000), "too large: .* 4110 bytes"),
    "empty": (TRAIN_LABELS, b"", "truncated by 14 bytes: 0 .*expected 14"),
}


@pytest.mark.parametrize("bad", BAD_FILES)
def test_a_bad_file_is_named_with_what_was_found_expected_and_the_remedy(tmp_path, bad):
    stem, raw, message = BAD_FILES[bad]
    folder = write(tmp_path / "data", contents())
    path = folder / f"{stem}.gz"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*({message}).*{REMEDY}$"):
        read_folder(folder, tiny(tmp_path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), compressed=st.booleans())
def test_damage_is_an_error_or_harmless(tmp_path, data, compressed):
    content = contents()[TEST_LABELS]
    raw = bytearray(gz(content) if compressed else content)
    for bit in data.draw(st.lists(st.integers(0, 8 * len(raw) - 1), max_size=3, unique=True)):
        raw[bit // 8] ^= 1 << bit % 8
    damaged = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        array, _ = check(damaged, TEST_LABELS, "FILE", tiny(tmp_path))
    except ValueError as error:
        assert str(error).startswith("FILE: ")
    else:
        assert encode(array) == content


def test_an_edition_known_by_its_compressed_files_is_accepted_compressed_only(tmp_path):
    published = {stem: gz(content) for stem, content in contents().items()}
    digests = {stem: hashlib.sha1(raw).hexdigest() for stem, raw in published.items()}
    files = tiny(tmp_path, editions=(Edition("2017-08-26", digests),))
    folder = write(tmp_path / "data", contents())
    assert read_folder(folder, files)[1].date == "2017-08-26"
    (folder / f"{TRAIN_LABELS}.gz").unlink()
    (folder / TRAIN_LABELS).write_bytes(contents()[TRAIN_LABELS])
    with pytest.raises(ValueError, match=f"SHA-1 .*expected {digests[TRAIN_LABELS]}"):
        read_folder(folder, files)


def test_a_mixture_of_editions_is_refused(tmp_path):
    mixed = {**contents(), TEST_LABELS: contents(1)[TEST_LABELS]}
    folder = write(tmp_path / "data", mixed)
    message = f"{TRAIN_LABELS}.gz of 2017-08-31, .*{TEST_LABELS}.gz of 2017-08-26; expected four"
    with pytest.raises(ValueError, match=message):
        read_folder(folder, tiny(tmp_path))


def test_a_folder_that_lacks_a_file_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"neither {TRAIN_IMAGES}.gz nor {TRAIN_IMAGES}"):
        read_folder(tmp_path, tiny(tmp_path))


def test_mxnets_constants_are_those_of_the_mxnet_installed(tmp_path):
    vision = pytest.importorskip("mxnet").gluon.data.vision

    class Names(vision.FashionMNIST):
        def _get_data(self):
            pass

    names = Names(root=str(tmp_path))
    pairs = (names._train_data, names._train_label, names._test_data, names._test_label)
    assert {name[: -len(".gz")]: digest for name, digest in pairs} == MXNETS.checksums


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    folder, real = write(tmp_path / "folder", contents()), open

    def refusing(path, *more):
        if "t10k-labels" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *more)

    monkeypatch.setattr("builtins.open", refusing)
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte.gz .*Permission denied"):
        read_folder(folder, tiny(tmp_path))
