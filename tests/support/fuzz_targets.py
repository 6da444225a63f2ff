"""What is fuzzed, by tests/project/test_fuzz.py and tools/fuzz.py: readers, and the law they are held to.

A target is called with an input. The first byte says in which layer of the format the rest is put,
so that what lies below a checksum is reached too; the reader gets a file, and either takes it, and
what it gave can be worked with, or raises ValueError with the file's name and has changed nothing.
Anything else is a Finding, or the exception that came, or the end of the process.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import io
import json
import pathlib
import random
import re
import resource
import struct
import zipfile
from typing import Any, Callable, Iterator

import idx_files
import mxnet as mx
import numpy as np

import gluonpar
from gluonpar.checkpoint import archive
from gluonpar.training.data import fashion_mnist, idx

NUM_BYTES = 256 << 20  # what reading a file of some kilobytes may never take


SIZES = [0, 1, 2, 3, 7, 255, 256, 623, 624, 625, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
VALUES: list[Any] = [None, False, True, *SIZES, -1, -(1 << 31), 1 << 62, 1 << 64, 10**30, 0.5, -0.1]
VALUES += [1e300, float("inf"), float("nan"), "", "sgd", "MT19937", [], [0], [[0, 0]], {}]


class Finding(AssertionError):
    """A reader broke its law; the message says how."""


@contextlib.contextmanager
def memory_limit(num_bytes: int = NUM_BYTES) -> Iterator[None]:
    """Within it, this process gets so much more address space, and then MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as pages:
        used = int(pages.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refused(read: Callable[[], Any], name: str) -> tuple[Any, bool]:
    """What ``read`` returns and False, or None and True for the ValueError it may raise."""
    try:
        return read(), False
    except ValueError as error:
        if name not in str(error):
            raise Finding(f"the error does not name {name}: {error}") from error
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError):
                raise Finding(f"it asked for memory that it cannot need: {error}") from error
            cause = cause.__cause__
    return None, True


class Idx:
    """The IDX reader and the check of Fashion-MNIST's files; layers: the file, what gzip holds."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.files = {
            stem: idx_files.encode(array)
            for stem, array in zip(
                (fashion_mnist.TRAIN_IMAGES, fashion_mnist.TRAIN_LABELS),
                (np.arange(12, dtype=np.uint8).reshape(3, 2, 2), np.arange(3, dtype=np.uint8)),
            )
        }
        digests = {stem: hashlib.sha256(raw).hexdigest() for stem, raw in self.files.items()}
        self.expected = fashion_mnist.Files(
            num_train=3, num_test=2, side=2, editions=(fashion_mnist.Edition("today", digests),)
        )

    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        return [
            bytes([layer]) + form(raw)
            for raw in self.files.values()
            for layer, form in ((0, bytes), (0, idx_files.gz), (1, bytes))
        ]

    def changed(self, data: bytes, chance: random.Random) -> bytes:
        """The input with another number where its header, if it has one, has numbers."""
        at = 1 + 4 * chance.randrange(4)
        return data[:at] + struct.pack(">I", chance.choice(SIZES)) + data[at + 4 :]

    def __call__(self, data: bytes) -> bool:
        """Whether the file was taken."""
        raw = data[1:]
        if data[:1] == b"\x01":
            raw = gzip.compress(raw, 1)
        taken = False
        for stem, whole in self.files.items():
            shape = self.expected.shape(stem)
            self._decode(raw, shape)
            found, no = refused(
                lambda stem=stem: fashion_mnist.check(raw, stem, "FILE", self.expected), "FILE"
            )
            if not no and found[0].tobytes() != whole[-found[0].size :]:
                raise Finding(f"{stem}: other values than those of its checksum")
            taken = taken or not no
        return taken

    @staticmethod
    def _decode(raw: bytes, shape: tuple[int, ...]) -> None:
        array, no = refused(
            lambda: idx.decode(idx.unpack(raw, shape, "FILE"), shape, "FILE"), "FILE"
        )
        if not no and (array.shape != shape or array.dtype != np.uint8):
            raise Finding(f"an array of {array.shape} {array.dtype} instead of {shape} uint8")


class _Archive:
    """A reader of sealed archives.

    Layers: the file; the zip file, with a right seal; the header, in a right file; a member's
    number and content, in a right file.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / f"{type(self).__name__.lower()}.npz"
        self.start()
        self.save()
        self.whole = self.path.read_bytes()
        self.header, self.arrays = archive.read(self.whole)
        with zipfile.ZipFile(io.BytesIO(self.whole)) as file:
            self.members = {name: file.read(name) for name in file.namelist()}

    def seeds(self) -> list[bytes]:
        """Valid inputs."""
        members = [bytes([3, i]) + content for i, content in enumerate(self.members.values())]
        header = b"\x02" + json.dumps(self.header).encode()
        return [b"\x00" + self.whole, b"\x01" + self.whole, header, *members]

    def file(self, data: bytes) -> bytes:
        """The file that an input stands for."""
        layer, rest = data[0] % 4 if data else 0, data[1:]
        if layer == 0:
            return rest
        buffer = io.BytesIO()
        if layer == 1:
            buffer.write(rest.ljust(2, b"\x00"))
        else:
            members = dict(self.members)
            which = list(members)[rest[0] % len(members) if rest else 0]
            members.update({which: rest[1:]} if layer == 3 else _as_header(rest))
            with zipfile.ZipFile(buffer, "w") as file:
                for name, content in members.items():
                    file.writestr(name, content)
        archive.seal(buffer)
        return buffer.getvalue()

    def changed(self, data: bytes, chance: random.Random) -> bytes:
        """A header with another value somewhere, or an array with another number in its header."""
        if chance.random() < 0.3:
            which, content = chance.choice(list(enumerate(self.members.values())))
            places = list(re.finditer(rb"\d+", content[:128]))
            start, end = chance.choice(places).span()
            number = str(chance.choice(SIZES)).encode()
            return bytes([3, which]) + content[:start] + number + content[end:]
        try:
            header = json.loads(data[1:]) if data[:1] == b"\x02" else copy.deepcopy(self.header)
            places = list(paths(header))
        except (ValueError, RecursionError):
            header, places = copy.deepcopy(self.header), list(paths(self.header))
        if places:
            put(header, chance.choice(places), chance.choice(VALUES))
        return b"\x02" + json.dumps(header).encode()

    def __call__(self, data: bytes) -> bool:
        """Whether the file was taken."""
        self.path.write_bytes(self.file(data))
        before = self.state()
        _, no = refused(self.load, str(self.path))
        if no and self.state() != before:
            raise Finding("it was refused and has changed something")
        if not no:
            self.use()
            self.start()
        return not no

    def start(self) -> None:
        """Make what is loaded into."""
        self.params = gluonpar_params()
        options = {"learning_rate": 0.1, "momentum": 0.9, "clip_gradient": 2.0}
        options["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
        self.trainer = gluonpar.Trainer(self.params, "sgd", options)
        self.step()

    def step(self) -> None:
        """One update, and wait for it: wrong states would end the process here."""
        with mx.autograd.record():
            loss = sum((param.data() ** 2).sum() for param in self.params)
        loss.backward()
        self.trainer.step(1)
        mx.nd.waitall()

    def use(self) -> None:
        """Work with what was loaded. Its numbers may be absurd; a process must survive them."""
        self.trainer.optimizer.lr_scheduler = None  # it may be told of 10**18 steps, and count them
        with contextlib.suppress(ArithmeticError, ValueError, mx.MXNetError):
            self.step()

    def state(self) -> list[Any]:
        """All that loading may change."""
        optimizer, states = self.trainer.optimizer, self.trainer._updater.states
        arrays = [param.data() for param in self.params] + [states[i] for i in sorted(states)]
        numbers = [sorted((k, repr(v)) for k, v in vars(optimizer).items() if k != "param_dict")]
        schedule = sorted(vars(optimizer.lr_scheduler).items())
        return [array.asnumpy().tobytes() for array in arrays] + numbers + schedule


def paths(of: Any) -> Iterator[tuple]:
    """The way to every value inside ``of``."""
    inside = of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ()
    for key, value in inside:
        yield (key,)
        yield from ((key, *path) for path in paths(value))


def put(of: Any, path: tuple, value: Any) -> None:
    """Replace what ``path`` leads to inside ``of``."""
    for key in path[:-1]:
        of = of[key]
    of[path[-1]] = value


def gluonpar_params() -> list[mx.gluon.Parameter]:
    """Two small parameters on one device."""
    made = []
    for name, value in (("weight", np.arange(6).reshape(2, 3)), ("bias", np.arange(2))):
        param = mx.gluon.Parameter(name, shape=value.shape, init=mx.init.Constant(0.5))
        param.initialize()
        made.append(param)
    return made


class States(_Archive):
    """``Trainer.load_states``."""

    def save(self) -> None:
        """Write a file."""
        self.trainer.save_states(self.path)

    def load(self) -> None:
        """Read a file."""
        self.trainer.load_states(self.path)


class Checkpoint(_Archive):
    """``load_checkpoint`` with everything that may be in a checkpoint."""

    def start(self) -> None:
        """Make what is loaded into."""
        super().start()
        self.rng = np.random.RandomState(3)
        self.copies = [[param.data() for param in self.params]]

    def save(self) -> None:
        """Write a file."""
        notes = {"epoch": 2, "history": [{"loss": 0.25}]}
        gluonpar.save_checkpoint(self.path, self.copies, self.trainer, self.rng, notes)

    def load(self) -> None:
        """Read a file."""
        notes = gluonpar.load_checkpoint(self.path, self.copies, self.trainer, self.rng)
        if not isinstance(notes, dict):
            raise Finding(f"notes are {notes!r}")

    def use(self) -> None:
        """Work with what was loaded."""
        super().use()
        self.rng.randint(10, size=3)
        self.rng.normal(size=2)

    def state(self) -> list[Any]:
        """All that loading may change."""
        kind, keys, *numbers = self.rng.get_state()
        return [*super().state(), kind, keys.tobytes(), numbers]


def _as_header(text: bytes) -> dict[str, bytes]:
    buffer = io.BytesIO()
    np.save(buffer, np.frombuffer(text, "uint8"))
    return {"header.npy": buffer.getvalue()}


TARGETS = {"idx": Idx, "checkpoint": Checkpoint, "states": States}
