"""The options of all commands, as dataclasses: name, type, limits, help and default of each.

A command line and a call from Python make the same object, which checks its values. Neither MXNet
nor NumPy is imported, so help, and errors of options, are printed at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import math
import numbers
import os
import re
import sys
from typing import Any, Callable, ClassVar, Iterable, NamedTuple, NoReturn, Sequence, TypeVar

from gluonpar.install import __version__

BAD_REQUEST, OUT_OF_MEMORY, NOT_SAVED, DIVERGED = 2, 3, 4, 5
INTERRUPTED, BROKEN_PIPE, TERMINATED = 130, 141, 143
EXIT_CODES = {  # of all commands; each has its own meaning of 0 and 1
    BAD_REQUEST: "the request cannot be met; a line says why",
    INTERRUPTED: "interrupted (Ctrl-C)",
    BROKEN_PIPE: "nobody reads the output any more, as after | head -1",
}
DEVICES = ("auto", "gpu", "cpu")
DATASETS = ("fashion-mnist", "synthetic")
COLLECTIVES = ("allreduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}  # of the models, with SGD
# For Gluon networks, each with its learning rate, if that is not the model's.
OPTIMIZERS = {"sgd": None, "nag": None, "adam": 0.001, "lamb": 0.001, "rmsprop": 0.001}
_WITH_MOMENTUM = ("sgd", "nag", "rmsprop")
_EPOCHS, _ALGORITHM = ("--epochs", "--num-epochs"), ("--algorithm", "--allreduce")
_LARGEST = 3.4028234663852886e38  # float32
# Set by the launchers of a job, in which ranks check values together, and rank 0 prints the error.
OF_JOBS = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"}

# By the type of an option, or of the elements of a tuple: the types of its value, words for these,
# and what converts text.
_TYPES: dict[str, tuple[Any, str, Callable[[str], Any]]] = {
    "int": (numbers.Integral, "an integer", int),
    "float": (numbers.Real, "a number", float),
    "bool": (bool, "True or False", bool),
    "str": ((str, os.PathLike), "a string", str),
}


class _Option(NamedTuple):
    """What a field of a command's options says besides its type and default."""

    text: str  # its help
    metavar: str | None = None
    least: float | None = None  # limits hold for the elements of a tuple
    most: float = math.inf
    positive: bool = False
    choices: Iterable[Any] | None = None
    group: str | None = None  # the heading in the help for this option and those after it
    flags: Sequence[str] = ()
    convert: Callable[[str], Any] | None = None  # makes a value, or an element, of text


def option(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return the field of an option whose help is ``text``; ``more`` are limits and names.

    On a command line a tuple is written with commas.
    """
    return dataclasses.field(default=default, metadata={"option": _Option(text, metavar, **more)})


def count(default: int | None, text: str, metavar: str = "N", **more: Any) -> Any:
    """Return the field of an option that is a number of things, at least 1."""
    return option(default, text, metavar, **{"least": 1, **more})


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a command; a subclass has a field for each.

    ``module`` has the function ``main`` that runs it, and ``title`` is its line in the list of
    commands. Raises TypeError for a value of another type, and ValueError for one that is not
    allowed.
    """

    module: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    examples: ClassVar[str] = ""
    exit_codes: ClassVar[dict[int, str]] = {}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, (kind, is_tuple, is_optional) = getattr(self, field.name), _type(field)
            if value is None and is_optional:
                continue
            if not is_tuple:
                value = _checked(field, kind, value)
            elif isinstance(value, str) or not hasattr(value, "__iter__"):
                words = f"{_TYPES[kind][1].split()[-1]}s"
                raise TypeError(f"{field.name} must be a list of {words}, got {value!r}")
            else:
                value = tuple(_checked(field, kind, each) for each in value)
            object.__setattr__(self, field.name, value)


def _type(field: dataclasses.Field) -> tuple[str, bool, bool]:
    """Return the type of a field or of its elements, whether it is a tuple, and may be None."""
    match: Any = re.fullmatch(r"(tuple\[)?(\w+)(?:, \.\.\.\])?( \| None)?", str(field.type))
    return match[2], bool(match[1]), bool(match[3])


def _checked(field: dataclasses.Field, kind: str, value: Any) -> Any:
    """Return the value, with a path as text."""
    name, (types, words, _), of = field.name, _TYPES[kind], field.metadata["option"]
    if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool"):
        raise TypeError(f"{name} must be {words}, got {value!r}")
    must = ""
    if of.choices is not None and value not in of.choices:
        must = f"be one of {', '.join(of.choices)}"
    elif of.positive and not 0 < value <= _LARGEST:
        must = "be a positive finite number"
    elif kind == "float" and not math.isfinite(value):
        must = "be finite"
    elif of.least is not None and not of.least <= value <= of.most:
        bounded = of.most < math.inf
        must = f"be between {of.least} and {of.most}" if bounded else f"be at least {of.least}"
    elif value == "" and name != "resume":
        must = "not be empty"
    if must:
        raise ValueError(f"{name} must {must}, got {value!r}")
    return os.fspath(value) if kind == "str" else value


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line, and a description printed as it is written."""

    def __init__(self, **more: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)
        self.add_argument("--version", action="version", version=f"gluonpar {__version__}")
        # The private field of a regular expression: `--weights -1,2` has a value, not an option.
        self._negative_number_matcher = re.compile(r"-[\d.]")

    def in_options(self, message: object) -> str:
        """Return the message of a function's error, with options in place of its arguments.

        >>> parser = Parser()
        >>> _ = parser.add_argument("--num-gpus")
        >>> parser.in_options("num_gpus=3, but there are 2; num_gpus must be at most 2")
        '--num-gpus 3, but there are 2; --num-gpus must be at most 2'
        """
        text = str(message)
        for action in self._actions:
            flag, name = action.option_strings[0], action.dest
            # A name of one word, such as device, may be a word of the message.
            end = r"\b" if "_" in name else r"(?= (must|needs)\b)"
            text = re.sub(rf"(?<![\w./'-]){name}='?([^\s',]+)'?", rf"{flag} \1", text)
            text = re.sub(rf"(?<![\w./'-]){name}{end}", flag, text)
        return text

    def error(self, message: str) -> NoReturn:
        """Exit with one line on stderr."""
        self.exit(BAD_REQUEST, f"{self.prog}: error: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and versions; raise OSError if that fails, which argparse ignores."""
        if message:
            print(message, end="", file=file or sys.stderr, flush=True)


def parser(kind: type[Options], prog: str | None = None) -> Parser:
    """Return the parser of a command's options; ``prog`` is the program's name in messages."""
    lines = [f"  {line}" for line in kind.examples.strip().splitlines()]
    epilog = ["examples:", *lines, ""] if lines else []
    if kind.exit_codes:
        codes = sorted({**EXIT_CODES, **kind.exit_codes}.items())
        epilog += ["exit codes:", *(f"  {code:<5}{meaning}" for code, meaning in codes)]
    usage = "%(prog)s [OPTION ...]"  # with all options it would take fifteen lines
    made = Parser(prog=prog, usage=usage, description=kind.about, epilog="\n".join(epilog))
    group: Any = made
    group_of = functools.lru_cache(None)(made.add_argument_group)
    for field in dataclasses.fields(kind):
        (type_, is_tuple, _), of = _type(field), field.metadata["option"]
        group = group_of(of.group) if of.group else group
        how: dict[str, Any] = {"dest": field.name, "default": field.default, "help": of.text}
        if type_ == "bool":
            how["action"] = "store_true"
        else:
            one = of.convert or _TYPES[type_][2]
            how.update(type=functools.partial(_several, one) if is_tuple else one)
            how.update(metavar=of.metavar, choices=None if is_tuple else of.choices)
        if field.name == "resume":  # its value may be left out
            how.update(nargs="?", const="")
        group.add_argument(*(of.flags or [f"--{field.name.replace('_', '-')}"]), **how)
    return made


def _several(kind: Callable[[str], Any], text: str) -> tuple:
    try:
        return tuple(kind(part.strip()) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 1,2, got {text!r}") from None


def check_names(kind: type[Options], names: Iterable[str]) -> None:
    """Raise TypeError, with the right name if there is one, unless ``kind`` has these options."""
    flags = {field.name: field.metadata["option"].flags for field in dataclasses.fields(kind)}
    for name in names:
        if name not in flags:
            known = [each for each in flags if f"--{name.replace('_', '-')}" in flags[each]]
            raise TypeError(f"there is no option {name!r}; there are {', '.join(known or flags)}")


def num_bytes(text: str) -> int:
    """Convert 4096, 4K, 64M or 1G to a number of bytes."""
    match = re.fullmatch(r"(\d{1,20})([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size such as 4K or 64M, got {text!r}")
    return int(match[1]) << 10 * " KMG".index(match[2] or " ")


T = TypeVar("T", bound=Options)


def parse(
    kind: type[T], argv: Sequence[str] | None = None, prog: str | None = None
) -> tuple[T, Parser]:
    """Return the options in ``argv`` (default: the process's), and their parser; exit on errors."""
    made = parser(kind, prog)
    values = vars(made.parse_args(argv))
    try:
        return kind(**values), made
    except (TypeError, ValueError) as error:
        made.error(made.in_options(error))


def run(program: str, work: Callable[[], int]) -> int:
    """Return ``work()``, the exit code of a command, or another one, as :data:`EXIT_CODES` says."""
    try:
        return work()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print(f"\n{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        full = error.errno == errno.ENOSPC and not error.filename
        if not (full or isinstance(error, BrokenPipeError)):
            raise
        # Else Python would fail again at its end, when it writes its buffers.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if full:
            print(f"{program}: error: cannot print: {error.strerror}", file=sys.stderr)
        return BAD_REQUEST if full else BROKEN_PIPE


@dataclasses.dataclass(frozen=True)
class Configuration(Options):
    """The options of a run; ``gluonpar train --help`` says what each of them means.

    Raises TypeError for a value of another type, and ValueError for one that is not allowed.
    :class:`gluonpar.training.Run` checks values that depend on the machine or the data.
    """

    module, title = "training.command_line", "train LeNet or ResNet-18 on K devices"
    about = "Train LeNet or ResNet-18 on Fashion-MNIST, on several devices at once."
    examples = """
gluonpar train --num-gpus 2
gluonpar train --num-gpus 4 --device cpu --epochs 1 --limit 6000
gluonpar train --model resnet18 --optimizer adam --history run.csv
gluonpar train --model resnet18 --save-dir out --plot out/curves.png
gluonpar train --model resnet18 --save-dir out --resume
"""
    exit_codes = {
        0: "the training, or the dry run, is complete",
        1: "an exception, with its traceback, such as after a GPU's failure",
        BAD_REQUEST: "the options are wrong or cannot be met",
        OUT_OF_MEMORY: "out of memory, on the host or a GPU",
        NOT_SAVED: "trained to the end, but a file or the output was not written",
        DIVERGED: "the loss or a parameter became infinite, NaN or too large",
        TERMINATED: "ended by SIGTERM; with --save-dir a checkpoint was written",
    }

    num_gpus: int | None = count(None, "train on K GPUs, or K CPU devices", "K", group="devices")
    batch_size: int = count(256, "samples per step, on all devices (%(default)s)", group="training")
    lr: float | None = option(None, "learning rate (0.2; resnet18 0.1, Adam 0.001)", positive=True)
    num_epochs: int = count(4, "passes over the training images (%(default)s)", flags=_EPOCHS)
    gpus: tuple[int, ...] | None = option(None, "the GPUs, such as 0,2", "IDS", group="devices")
    device: str = option("auto", "gpu, or cpu; auto: GPUs if there are any", choices=DEVICES)
    weights: tuple[float, ...] | None = option(None, "relative speeds", "W,W", positive=True)
    algorithm: str | None = option(None, "the all-reduce, such as ring", "NAME", flags=_ALGORITHM)
    model: str = option("lenet", "network (%(default)s)", choices=LEARNING_RATES, group="training")
    optimizer: str = option("sgd", "for Gluon models (%(default)s)", choices=OPTIMIZERS)
    momentum: float | None = option(None, "of SGD, NAG and RMSProp", least=0)
    wd: float = option(0.0, "weight decay (%(default)s)", least=0)
    seed: int = option(0, "of initial parameters and order (%(default)s)", least=0, most=2**31 - 1)
    deterministic: bool = option(False, "repeat a seed's run bit for bit also on GPUs; slower")
    early_stop: int | None = count(
        None, "hold out a tenth of the images; stop after N epochs without a higher accuracy"
    )
    dataset: str = option(DATASETS[0], "synthetic: no files", choices=DATASETS, group="data")
    data_dir: str | None = option(None, "folder with the four files of Fashion-MNIST", "DIR")
    limit: int | None = count(None, "use the first N training and test images only")
    log_interval: int | None = count(None, "print the loss every N batches", group="output")
    save_dir: str | None = option(None, "save each epoch's parameters, and checkpoints", "DIR")
    save_every: int | None = count(None, "also save a checkpoint every N batches")
    keep: int = count(3, "keep the last N checkpoints (%(default)s)")
    resume: str | None = option(
        None, "continue from this checkpoint, or the newest in this folder or --save-dir", "PATH"
    )
    onnx: bool = option(False, "also save each epoch's network in --save-dir as ONNX")
    plot: str | None = option(None, "plot loss, test accuracy and images/s", "FILE.png")
    history: str | None = option(None, "write a row per epoch, to .csv or .jsonl", "FILE")
    profile: bool = option(False, "print where a step's time goes, in the first epoch")
    dry_run: bool = option(False, "check everything and take one step; save nothing")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is None:
            lr = OPTIMIZERS[self.optimizer] or LEARNING_RATES[self.model]
            object.__setattr__(self, "lr", lr)
        if self.model == "lenet" and (self.optimizer, self.momentum, self.wd) != ("sgd", None, 0):
            raise ValueError(
                "optimizer must be sgd, without momentum and wd, for lenet: it is updated by hand, "
                "by the book's sgd. For the Trainer's loop see --model resnet18, or "
                "examples/training_loop.py"
            )
        if self.momentum is not None and self.optimizer not in _WITH_MOMENTUM:
            raise ValueError(f"momentum must be left out with {self.optimizer}, which has none")
        if self.history is not None and not self.history.endswith((".csv", ".jsonl")):
            raise ValueError(f"history must end in .csv or .jsonl, got {self.history!r}")
        if self.algorithm is not None:
            from gluonpar.plans import ALGORITHMS  # here, because it imports NumPy

            known = sorted({*ALGORITHMS, "host", "nccl"})  # these two have no plan
            if self.algorithm not in known:
                must = f"algorithm must be one of {', '.join(known)}"
                raise ValueError(f"{must}, got {self.algorithm!r}")
        if self.save_dir is None:
            for name in ("save_every", "keep", "onnx"):
                if getattr(self, name) != getattr(Configuration, name):
                    raise ValueError(f"{name} needs a folder for files: give save_dir too")
            if self.resume == "":
                raise ValueError("resume must be a checkpoint or a folder without a save_dir")


@dataclasses.dataclass(frozen=True)
class Measured(Options):
    """The options of every benchmark."""

    exit_codes = {0: "measured", 1: "some value was wrong; a line says which"}

    json: str | None = option(None, "write all samples to this file", "FILE")


@dataclasses.dataclass(frozen=True)
class Bench(Measured):
    """The options of gluonpar bench, named as in nccl-tests."""

    module, title = "diagnostics.bench", "measure the all-reduce algorithms beside MXNet's own"
    about = """Measure the all-reduce algorithms beside MXNet's kvstore and plain NumPy.

--collective measures gluonpar's other collectives. The figures mean the same as
in nccl-tests."""
    examples = """
gluonpar bench --num-gpus 2
gluonpar bench --num-gpus 4 --device cpu --min-bytes 64K --factor 4
gluonpar bench --algorithms host,ring --json bench.json
gluonpar bench --collective reduce_scatter
"""

    device: str = option("auto", "gpu, or cpu; auto: GPUs if there are any", choices=DEVICES)
    min_bytes: int = option(4 << 10, "smallest array of a device (4K)", "SIZE", convert=num_bytes)
    max_bytes: int = option(64 << 20, "largest array (64M)", "SIZE", convert=num_bytes)
    factor: int = count(8, "ratio of one size to the one before (%(default)s)", least=2)
    num_gpus: int = count(2, "number of devices (%(default)s)", "K", least=2)
    dtype: str = option("float32", "of the arrays (%(default)s)", "DTYPE", choices=DTYPES)
    collective: str = option(
        "allreduce", f"to measure: {', '.join(COLLECTIVES)}", "NAME", choices=COLLECTIVES
    )
    rounds: int = count(20, "samples (%(default)s)", flags=("--iters",))
    calls: int = count(1, "calls before each wait; a sample is one call's share (%(default)s)")
    warmup: int = count(5, "samples before that do not count (%(default)s)", least=0)
    algorithms: tuple[str, ...] | None = option(None, "of allreduce, to measure (all)", "A,B")


@dataclasses.dataclass(frozen=True)
class SelfTest(Options):
    """The options of gluonpar selftest."""

    module, title = "diagnostics.self_test", "test that gluonpar computes correctly here"
    about = """Test on this machine's devices that gluonpar computes correctly.

Every check computes on the devices and compares values with those of NumPy or
of MXNet alone, so a device that supports peer-to-peer copies, but corrupts the
data, is found."""
    examples = """
gluonpar selftest                # all GPUs, or two CPU devices
gluonpar selftest --num-gpus 4   # four GPUs, or four CPU devices
"""
    exit_codes = {0: "nothing is wrong", 1: "something is wrong, and printed"}

    num_gpus: int | None = count(None, "K GPUs; K CPU devices if there is no GPU", "K", most=64)
    device: str = option("auto", "only GPUs, or only CPU devices", choices=DEVICES)


@dataclasses.dataclass(frozen=True)
class Doctor(Options):
    """The options of gluonpar doctor."""

    module, title = "diagnostics.doctor", "print what is installed and wrong, with remedies"
    about = """Print what is installed and what is wrong, with a remedy for each fault.

It changes nothing, downloads nothing, and works without MXNet and NumPy."""
    examples = """
gluonpar doctor
gluonpar doctor --json    # {"wrong": number, "findings": [...]}
"""
    exit_codes = {0: "nothing is wrong", 1: "something is wrong, and printed with a remedy"}

    json: bool = option(False, "print the findings as JSON")
