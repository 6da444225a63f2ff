"""The command line of the training scripts: arguments in, exit code out."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
import zlib
from typing import Any, Iterator, Sequence

from gluonpar import cluster, collectives, metrics
from gluonpar.cluster import ending, world
from gluonpar.runtime import devices, memory_limits
from gluonpar.runtime.version import __version__
from gluonpar.training import checkpointing
from gluonpar.training import console as report
from gluonpar.training.data import dataset
from gluonpar.training.run import DEFAULT_LOG_INTERVAL, Configuration, Run

TRAINED, BAD_REQUEST, OUT_OF_MEMORY, INTERRUPTED, TERMINATED = 0, 2, 3, 130, 143
_OF_MEMORY_PERHAPS = (MemoryError, RuntimeError, OSError)  # MXNetError is a RuntimeError


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of GPU ids such as 0,2") from None


def _speeds(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of speeds such as 1,2") from None


# Per group, the flags and what argparse is to know of them. Defaults are those of Configuration.
OPTIONS = {
    "devices": {
        "--num-gpus": {
            "type": int,
            "metavar": "K",
            "help": "train on K GPUs; on K CPU devices if there is no GPU at all",
        },
        "--gpus": {
            "type": _ids,
            "metavar": "IDS",
            "help": "train on the GPUs with these ids, such as 0,2",
        },
        "--device": {
            "choices": devices.KINDS,
            "help": "GPUs or nothing; CPU devices; or as above (auto)",
        },
        "--weights": {
            "type": _speeds,
            "metavar": "W,W",
            "help": "the devices' relative speeds, such as 1,2: a batch is cut accordingly",
        },
        "--allreduce": {
            "dest": "algorithm",
            "metavar": "NAME",
            "help": f"one of: {', '.join(collectives.ALGORITHMS)}",
        },
    },
    "training": {
        "--batch-size": {
            "type": int,
            "metavar": "N",
            "help": "samples a step, over all devices together (%(default)s)",
        },
        "--lr": {"type": float, "help": "learning rate (%(default)s)"},
        "--epochs --num-epochs": {
            "dest": "num_epochs",
            "type": int,
            "metavar": "N",
            "help": "passes over the training images (%(default)s)",
        },
        "--seed": {
            "type": int,
            "help": "of the initial parameters and the shuffling (%(default)s)",
        },
    },
    "data": {
        "--dataset": {"choices": dataset.NAMES, "help": "synthetic needs no files (%(default)s)"},
        "--data-dir": {"metavar": "DIR", "help": "folder with Fashion-MNIST's four files"},
        "--limit": {
            "type": int,
            "metavar": "N",
            "help": "train on the first N images only, for a quick run",
        },
    },
    "output": {
        "--log-interval": {
            "type": int,
            "metavar": "N",
            "help": "print the loss each N batches (default: only in the progress bar, each "
            f"{DEFAULT_LOG_INTERVAL})",
        },
        "--save-dir": {
            "metavar": "DIR",
            "help": "keep the parameters of every epoch, and checkpoints, in this folder",
        },
        "--save-every": {
            "type": int,
            "metavar": "N",
            "help": "write a checkpoint each N batches too, not only after each epoch",
        },
        "--keep": {
            "type": int,
            "metavar": "N",
            "help": "keep the last N checkpoints (%(default)s)",
        },
        "--resume": {
            "nargs": "?",
            "const": "",
            "metavar": "FILE|DIR",
            "help": "go on from this checkpoint, or the newest in this folder; without a value "
            "from the newest in --save-dir, if there is one yet",
        },
        "--onnx": {
            "action": "store_true",
            "help": "keep every epoch's network in --save-dir as an ONNX file too, from uint8 "
            "pixels (n, 1, 28, 28) to scores (n, 10); needs the package onnx",
        },
        "--plot": {
            "metavar": "FILE.png",
            "help": "draw loss, test accuracy and images/s over epochs",
        },
        "--profile": {
            "action": "store_true",
            "help": "print where a step's time goes, from some steps of the first epoch",
        },
        "--trace": {
            "metavar": "FILE.json",
            "help": "write those steps for ui.perfetto.dev or chrome://tracing",
        },
        "--dry-run": {
            "action": "store_true",
            "help": "check everything, take one step, train nothing",
        },
    },
}


def main(description: str, argv: Sequence[str] | None = None, **defaults: Any) -> int:
    """Train as ``argv`` asks (default: the process's arguments); the exit code.

    ``defaults`` are fields of :class:`Configuration` that this script sets otherwise.

    0: it trained (or the dry run passed). 2: the request cannot be met, or the loss diverged; one
    line on stderr says why and what to do. 3: memory ran out, here or on a GPU; one line says what
    could not be had, what to do and what was kept, and the process ends at once: MXNet might hang.
    130: interrupted by Ctrl-C; one line says what was kept. 143: ended by SIGTERM, after writing a
    checkpoint if there is a ``--save-dir``. Errors that are nobody's request keep their traceback,
    and end with 1. With several processes the job ends with 1 where one ends with 3.
    """
    options_parser = parser(description, **defaults)
    options = options_parser.parse_args(argv)
    console = report.Console()
    if (
        memory_limits.limits()
    ):  # MXNet's own handler of SIGSEGV may hang where there is no memory left
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        faulthandler.enable(all_threads=False)
    try:
        cluster.size()  # joins the others
    except (ImportError, RuntimeError, ValueError, MemoryError) as error:
        return _cannot_join(error)
    try:
        run = Run(cluster.together(lambda: Configuration(**vars(options))), console)
    except (ValueError, FileNotFoundError) as error:
        return _fail(as_typed(str(error), options_parser))
    except KeyboardInterrupt:
        return _interrupted([], options.save_dir)
    except _OF_MEMORY_PERHAPS as error:
        _leave_if_out_of_memory(error, options, [])
        raise
    try:
        with _ended_by_sigterm(run.keeper):
            run.train()
    except checkpointing.CannotResume as error:
        return _fail(as_typed(str(error), options_parser))
    except metrics.Diverged as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _interrupted([*run.kept, *run.keeper.kept], options.save_dir)
    except checkpointing.Terminated:
        return _terminated(run.keeper.kept)
    except _OF_MEMORY_PERHAPS as error:
        _leave_if_out_of_memory(error, options, run.keeper.kept)
        raise
    return TRAINED


def parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options; their destinations are the fields of :class:`Configuration`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--version", action="version", version=f"gluonpar {__version__}")
    for title, options in OPTIONS.items():
        group = made.add_argument_group(title)
        for flags, settings in options.items():
            group.add_argument(*flags.split(), **settings)
    made.set_defaults(**{**vars(Configuration()), **defaults})
    return made


def as_typed(message: str, made: argparse.ArgumentParser) -> str:
    """A message about fields, such as "num_gpus=0", in the words of the options: "--num-gpus 0"."""
    for action in made._actions:
        message = re.sub(rf"\b{action.dest}=", f"{action.option_strings[0]} ", message)
    return message


@contextlib.contextmanager
def _ended_by_sigterm(keeper: checkpointing.Keeper) -> Iterator[None]:
    """SIGTERM, the first time, lets the run end in order.

    Several processes have some seconds for that, if one saves; otherwise the watch ends them. They
    take SIGUSR1 likewise: mpirun hands it on to all and waits, but after SIGTERM it kills them.
    """
    signals = [signal.SIGTERM]
    if cluster.size() > 1:
        if not any(cluster.gather(keeper.folder is not None)):
            yield
            return
        world.world().watch.let_sigterm_wait(world.timeout_seconds())
        signals.append(signal.SIGUSR1)

    def ask_to_end(number: int, _: Any) -> None:
        signal.signal(number, before[number])
        keeper.ask_to_end()

    before = {number: signal.signal(number, ask_to_end) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated(kept: Sequence[str]) -> int:
    what = f"--resume goes on from {kept[-1]}" if kept else "nothing was kept (--save-dir DIR)"
    if cluster.is_main():
        print(f"{os.path.basename(sys.argv[0])}: ended by SIGTERM; {what}", file=sys.stderr)
    return TERMINATED


def _leave_if_out_of_memory(
    error: Exception, options: argparse.Namespace, kept: Sequence[str]
) -> None:
    """End the process with one line if it was memory that ``error`` is about."""
    short = memory_limits.shortage(error)
    if short is None:
        return
    limits = f" ({memory_limits.limits()})" if memory_limits.limits() else ""
    resumed = f"; --resume goes on from {kept[-1]}" if kept else ""
    way = f"try a smaller --batch-size than {options.batch_size}, or more memory{limits}"
    text = f"out of memory: {short}; {way}{resumed}"
    if cluster.size() > 1:
        world.world().watch.fail(f"ran {text}")
    print(f"{os.path.basename(sys.argv[0])}: error: {text}", file=sys.stderr)
    ending.leave(OUT_OF_MEMORY)


def _fail(message: str) -> int:
    if cluster.is_main():
        print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    return BAD_REQUEST


def _cannot_join(error: Exception) -> int:
    """Say why this process cannot train with those it was started with; the exit code.

    Once on each machine, if they have the same to say at about the same time.
    """
    short = memory_limits.shortage(error)
    text = str(error) if short is None else f"out of memory: {short} ({memory_limits.limits()})"
    if ending.speaks_first(f"{os.getppid()}-{zlib.crc32(text.encode()):x}"):
        print(f"{os.path.basename(sys.argv[0])}: error: {text}", file=sys.stderr, flush=True)
        time.sleep(1)  # as long as this process lives, the others know that it has been said
    return BAD_REQUEST if short is None else OUT_OF_MEMORY


def _interrupted(kept: Sequence[str], save_dir: str | None) -> int:
    if kept:
        what = f"kept: {', '.join(kept)}"
    elif save_dir:
        what = "nothing was kept, for no epoch was complete"
    else:
        what = "nothing was kept (--save-dir DIR keeps each epoch)"
    if cluster.is_main():
        print(f"\n{os.path.basename(sys.argv[0])}: interrupted; {what}", file=sys.stderr)
    return INTERRUPTED
