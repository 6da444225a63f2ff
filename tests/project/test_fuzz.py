"""Readers of files under inputs that nobody would write: refused by name, or taken and whole.

tools/fuzz.py does the same at length, guided by coverage; here hypothesis damages valid inputs in
all layers of the format (see fuzz_targets), the same ones in every run.
"""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zlib

import fuzz_targets
import numpy as np
import pytest
from fuzz_targets import TARGETS, Finding, memory_limit
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gluonpar.training.data import fashion_mnist, idx

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"
SAME_EVERY_TIME = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # what is found is an input for --replay; a shorter one tells no more
)


@pytest.fixture(scope="module")
def made():
    """Targets and their valid inputs, by name."""
    with tempfile.TemporaryDirectory() as folder:
        targets = {name: target(pathlib.Path(folder)) for name, target in TARGETS.items()}
        yield {name: (target, target.seeds()) for name, target in targets.items()}


@st.composite
def damages(draw):
    """A function of a valid input and another one: flips, cuts, insertions, splices, in turn."""
    places = st.floats(0, 1, exclude_max=True)
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "set", "cut", "remove", "insert", "splice"]),
                places,
                places,
                st.binary(min_size=1, max_size=9),
            ),
            min_size=1,
            max_size=4,
        )
    )

    def damaged(whole: bytes, other: bytes) -> bytes:
        found = bytearray(whole[1:])
        for how, where, until, content in steps:
            at, end = int(where * len(found)), int(until * len(found))
            if how == "flip" and found:
                found[at] ^= 1 << content[0] % 8
            elif how == "set":
                found[at : at + len(content)] = content
            elif how == "cut":
                del found[at:]
            elif how == "remove":
                del found[at:end]
            elif how == "insert":
                found[at:at] = content
            elif how == "splice":
                found[at:] = other[1 + int(until * (len(other) - 1)) :]
        return whole[:1] + bytes(found)

    return damaged


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_whole_is_taken(made, name):
    target, seeds = made[name]
    assert all(target(seed) for seed in seeds)


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_files_are_refused_by_name_or_taken_whole(made, name):
    target, seeds = made[name]
    taken = []

    @settings(SAME_EVERY_TIME, max_examples=500 if name == "idx" else 250)
    @given(damages(), st.sampled_from(seeds), st.sampled_from(seeds))
    def damage(damaged, seed, other):
        data = damaged(seed, other)
        taken.append(target(data))
        assert not taken[-1] or data[:1] != b"\x00" or data == seed or name == "idx"

    with memory_limit():
        damage()
    assert any(taken) and not all(taken)  # both ways have been gone


@pytest.mark.parametrize("name", TARGETS)
def test_arbitrary_bytes_in_any_layer_are_refused_by_name(made, name):
    target, _ = made[name]

    @settings(SAME_EVERY_TIME, max_examples=200)
    @given(st.integers(0, 3), st.binary(max_size=300))
    def arbitrary(layer, content):
        assert not target(bytes([layer]) + content)

    with memory_limit():
        arbitrary()


def values():
    """JSON, with what is in the headers among it."""
    simple = st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | st.floats()
    words = st.sampled_from(["sgd", "weight", "lr", "MT19937", "update", "lr_scheduler", ""])
    return st.recursive(
        simple | words | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
        max_leaves=6,
    )


@pytest.mark.parametrize("name", ["checkpoint", "states"])
def test_other_values_in_the_header_are_refused_or_harmless(made, name):
    target, _ = made[name]
    places = sorted(fuzz_targets.paths(target.header), key=str)

    @settings(SAME_EVERY_TIME, max_examples=250)
    @given(st.sampled_from(places), values())
    def replaced(path, value):
        header = copy.deepcopy(target.header)
        fuzz_targets.put(header, path, value)
        target(b"\x02" + json.dumps(header).encode())

    with memory_limit():
        replaced()


# Bombs: files that promise more than they hold


def test_an_idx_header_that_promises_two_to_the_40_bytes_takes_nothing(tmp_path):
    header = b"\x00\x00\x08\x03" + b"\x00\x01\x00\x00" * 2 + b"\x00\x00\x01\x00"
    for raw in (header, gzip.compress(header)):
        with memory_limit(32 << 20), pytest.raises(ValueError, match="^FILE: "):
            fashion_mnist.check(raw, fashion_mnist.TRAIN_IMAGES, "FILE")
        with memory_limit(32 << 20), pytest.raises(ValueError, match="^FILE: .*truncated"):
            shape = (65536, 65536, 256)
            idx.decode(idx.unpack(raw, shape, "FILE"), shape, "FILE")


def test_a_gzip_bomb_takes_no_more_than_the_file_should(tmp_path):
    size = 512 << 20
    bomb = b"".join(gzip_blocks(size))
    assert len(bomb) < size / 500
    with memory_limit(128 << 20), pytest.raises(ValueError, match="FILE: the gzip holds more"):
        fashion_mnist.check(bomb, fashion_mnist.TRAIN_IMAGES, "FILE")


def gzip_blocks(size):
    packer, block = zlib.compressobj(9, wbits=31), bytes(1 << 20)
    for _ in range(size >> 20):
        yield packer.compress(block)
    yield packer.flush()


def test_a_large_file_in_place_of_a_small_one_is_not_read(tmp_path):
    """Sparse: a terabyte that takes no room on the disk."""
    files = fashion_mnist.Files(num_train=3, num_test=2, side=2)
    for stem in fashion_mnist.STEMS:
        with open(tmp_path / stem, "wb") as file:
            file.truncate(1 << 40)
    with memory_limit(32 << 20), pytest.raises(ValueError, match="train-images.*: too large"):
        fashion_mnist.read_folder(tmp_path, files)


# The law itself: what breaks it is seen


class Careless:
    """A reader that breaks its law in one of these ways."""

    def __init__(self, error):
        self.error = error

    def read(self):
        raise self.error


def test_an_error_without_the_files_name_is_a_finding():
    with pytest.raises(Finding, match="does not name FILE: no"):
        fuzz_targets.refused(Careless(ValueError("no")).read, "FILE")


def test_an_error_for_lack_of_memory_is_a_finding():
    error = ValueError("FILE is too large")
    error.__cause__ = MemoryError()
    with pytest.raises(Finding, match="memory that it cannot need: FILE is too large"):
        fuzz_targets.refused(Careless(error).read, "FILE")


def test_memory_is_limited_within_and_not_after():
    """Memory that was freed counts as used: glibc keeps it for what comes next."""
    with memory_limit(16 << 20), pytest.raises(MemoryError):
        np.empty(1 << 30, "uint8")
    assert np.empty(1 << 30, "uint8").size == 1 << 30  # addresses only; nothing is written


# tools/fuzz.py


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_script_replays_an_input(made, tmp_path):
    path = tmp_path / "input"
    path.write_bytes(made["idx"][1][0])
    done = run("--target", "idx", "--replay", path)
    assert (done.returncode, done.stdout) == (0, "idx: the input was taken\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "quux"), "there is no 'quux'; there are: idx, checkpoint, states"),
        (("--inputs", "0"), "0 is out of range; give 1 to 2147483647"),
        (("--replay", "absent", "--target", "idx"), "--replay absent cannot be read: No such file"),
        (("--replay", "absent"), "--replay absent is for one target; name it with --target"),
    ],
)
def test_what_the_script_cannot_do_is_one_line_and_exit_code_2(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("atheris"), reason="needs the extra fuzz")
def test_the_script_reports_a_short_run(tmp_path):
    done = run("--inputs", 300, "--target", "idx", "--folder", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("idx: 300 inputs, ")
    assert list((tmp_path / "idx").iterdir()) == []
