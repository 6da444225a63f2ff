"""The command line of `gluonpar train` and the scripts: options, messages and exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import traceback
from typing import Callable, NoReturn, Sequence

from gluonpar import cluster, collectives, metrics
from gluonpar.install import __version__, entry, memory_limits
from gluonpar.runtime import devices, interrupts
from gluonpar.training.checkpointing import ResumeError
from gluonpar.training.configuration import SCHEDULES, Configuration, optimizer_names
from gluonpar.training.console import Console
from gluonpar.training.data import dataset
from gluonpar.training.run import Run
from gluonpar.training.termination import Terminated
from gluonpar.training.workloads import WORKLOADS

TRAINED, FAILED, OUT_OF_MEMORY, NOT_SAVED, DIVERGED, TERMINATED = 0, 1, 3, 4, 5, 143
EXIT_CODES = {
    TRAINED: "the training, or the dry run, is complete",
    FAILED: "an exception, with its traceback, such as that of a GPU that fails",
    entry.BAD_REQUEST: "the options are wrong or cannot be met",
    OUT_OF_MEMORY: "out of memory, on the host or a GPU",
    NOT_SAVED: "trained to the end, but a file or the output could not be written",
    DIVERGED: "the loss or a parameter became infinite or NaN, or the mean loss exceeded 1000",
    entry.INTERRUPTED: "interrupted (Ctrl-C)",
    entry.BROKEN_PIPE: "nobody reads the output any more, as after | head -1",
    TERMINATED: "ended by SIGTERM, after writing a checkpoint if there is a --save-dir",
}
ABOUT = """Train LeNet or ResNet-18 on Fashion-MNIST, on several devices by data parallelism.

gluonpar train --num-gpus 2
gluonpar train --num-gpus 4 --device cpu --epochs 1 --limit 6000
gluonpar train --model resnet18 --save-dir out --plot out/curves.png
gluonpar train --model resnet18 --save-dir out --resume
"""

Say = Callable[..., None]  # prints a message on stderr

# A line of MXNet's messages about CUDA, but not a line of its traceback.
_CUDA = re.compile(r"(?!File )(.*\W)?(cuda|cudnn|cublas|curand|nccl)", re.IGNORECASE)


def main(
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    model: str | None = None,
    about: str = ABOUT,
) -> int:
    """Train with the options ``argv`` (default: the process's arguments); return the exit code.

    ``prog`` is the program's name in messages (default: the script's). ``about`` is for its help:
    one line, and then examples. Without ``model`` the option --model chooses one. The exit codes
    are :data:`EXIT_CODES`. With all codes from 2 but 141, one line on stderr has the reason, the
    remedy and what was saved.
    """
    parsed = parser(prog, model, about)
    options, console = parsed.parse_args(argv), Console()

    def say(message: str, before: str = "") -> None:
        console.notice(f"{before}{parsed.prog}: {parsed.in_options(message)}")

    interrupts.end_at_crash()
    try:
        cluster.size()  # joins the other processes
    except (ImportError, RuntimeError, ValueError, MemoryError) as error:
        shortage = memory_limits.shortage(error)
        say(f"error: out of memory: {shortage}" if shortage else f"error: {error}")
        return OUT_OF_MEMORY if shortage else entry.BAD_REQUEST
    run = None
    try:
        run = Run(cluster.together(lambda: Configuration(**vars(options))), console)
        with run.termination.by_signal(run.checkpointer.saves):
            run.train()
    except BrokenPipeError:
        cluster.abort("could not print")
        return entry.BROKEN_PIPE
    except KeyboardInterrupt:
        return _interrupted(say, run)
    except Terminated:
        if cluster.is_main():
            saved = _how_to_resume(run) or "nothing was saved (--save-dir DIR saves checkpoints)"
            say(f"ended by SIGTERM; {saved}")
        return TERMINATED
    except Exception as error:
        return _failed(error, say, run, options.batch_size)
    if console.failure:
        say(f"error: the output could not be written: {console.failure}")
    if run.lost:
        return _not_saved(say, run)
    return NOT_SAVED if console.failure else TRAINED


def parser(prog: str | None, model: str | None, about: str) -> entry.Parser:
    """Return the parser; it stores options under the names of :class:`Configuration`'s fields."""
    description, _, examples = about.partition("\n")
    made = entry.Parser(
        prog=prog,
        usage="%(prog)s [OPTION ...]",  # all of them would take fifteen lines
        description=description,
        epilog=entry.epilog(examples, EXIT_CODES),
    )
    if model is None:
        made.add_argument("--model", choices=WORKLOADS, help="what to train (%(default)s)")
    made.add_argument("--version", action="version", version=f"gluonpar {__version__}")

    add = made.add_argument_group("devices").add_argument
    add("--num-gpus", type=int, metavar="K", help="train on K GPUs, or K CPU devices without GPUs")
    help_ = "use the GPUs with these ids, such as 0,2"
    add("--gpus", type=_list_of(int), metavar="IDS", help=help_)
    help_ = "gpu: GPUs or an error; cpu: CPU devices; auto: see --num-gpus (%(default)s)"
    add("--device", choices=devices.KINDS, help=help_)
    help_ = "the devices' relative speeds, such as 1,2; shards are proportional to them"
    add("--weights", type=_list_of(float), metavar="W,W", help=help_)
    names = ", ".join(collectives.ALGORITHMS)
    help_ = f"the all-reduce: one of {names} (chosen)"
    add("--algorithm", "--allreduce", dest="algorithm", metavar="NAME", help=help_)

    add = made.add_argument_group("training").add_argument
    help_ = "samples per step, on all devices (%(default)s)"
    add("--batch-size", type=int, metavar="N", help=help_)
    help_ = "passes over the training images (%(default)s)"
    add("--epochs", "--num-epochs", dest="num_epochs", type=int, metavar="N", help=help_)
    add("--seed", type=int, help="of the initial parameters and the shuffling (%(default)s)")
    help_ = "on GPUs too, runs of one seed end with the same bits; slower there"
    add("--deterministic", action="store_true", help=help_)
    help_ = "go on when the loss or a parameter becomes infinite or NaN, or the loss exceeds 1000"
    add("--no-check-finite", dest="check_finite", action="store_false", help=help_)
    help_ = "hold out a tenth of the images; stop after N epochs without a better accuracy on it"
    add("--early-stop", type=int, metavar="N", help=help_)

    add = made.add_argument_group("optimizer").add_argument
    help_ = f"one of MXNet's: {', '.join(optimizer_names())} (%(default)s)"
    add("--optimizer", metavar="NAME", help=help_)
    help_ = "learning rate (0.2, resnet18 0.1; MXNet's own for other optimizers than sgd)"
    add("--lr", type=float, help=help_)
    add("--momentum", type=float, metavar="M", help="of sgd, nag, ... (the optimizer's own)")
    add("--wd", type=float, metavar="W", help="weight decay (%(default)g)")
    help_ = "how the learning rate changes from step to step (%(default)s)"
    add("--lr-schedule", choices=SCHEDULES, help=help_)
    help_ = "step: the epochs after which it is multiplied by --lr-factor, such as 2,3"
    add("--lr-steps", type=_list_of(int), metavar="E,E", help=help_)
    add("--lr-factor", type=float, metavar="F", help="step: the factor (%(default)g)")
    help_ = "raise the learning rate linearly from 0 in the first X epochs, such as 0.5"
    add("--warmup-epochs", type=float, metavar="X", help=help_)

    add = made.add_argument_group("data").add_argument
    add("--dataset", choices=dataset.NAMES, help="synthetic needs no files (%(default)s)")
    add("--data-dir", metavar="DIR", help="folder with the four files of Fashion-MNIST")
    add("--limit", type=int, metavar="N", help="use the first N training and test images only")

    add = made.add_argument_group("output").add_argument
    add("--log-interval", type=int, metavar="N", help="print the loss every N batches")
    help_ = "save the parameters of every epoch, and checkpoints, in this folder"
    add("--save-dir", metavar="DIR", help=help_)
    add("--save-every", type=int, metavar="N", help="also save a checkpoint every N batches")
    add("--keep", type=int, metavar="N", help="keep the last N checkpoints (%(default)s)")
    help_ = (
        "continue from this checkpoint, or the newest in this folder or, without it, in --save-dir"
    )
    add("--resume", nargs="?", const="", metavar="FILE|DIR", help=help_)
    help_ = "save every epoch's network in --save-dir as ONNX, too; needs the package onnx"
    add("--onnx", action="store_true", help=help_)
    add("--plot", metavar="FILE.png", help="plot loss, test accuracy and images/s over epochs")
    help_ = "write a table of the epochs, complete after each: time, loss, accuracy, lr"
    add("--history", metavar="FILE.csv|.json", help=help_)
    help_ = "write these figures for TensorBoard; needs the package tensorboardX"
    add("--tensorboard", metavar="DIR", help=help_)
    add("--profile", action="store_true", help="print where a step's time goes, in the first epoch")
    add("--dry-run", action="store_true", help="check everything and take one step; save nothing")

    made.set_defaults(**{field.name: field.default for field in dataclasses.fields(Configuration)})
    made.set_defaults(**({"model": model} if model else {}))
    return made


def _list_of(kind: Callable) -> Callable[[str], tuple]:
    def parse(text: str) -> tuple:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be numbers such as 1,2, got {text!r}") from None

    return parse


def _failed(error: Exception, say: Say, run: Run | None, batch_size: int) -> int:
    """Explain an exception and return the exit code; raise it again if it has no explanation."""
    refusals = (ValueError, FileNotFoundError)  # of the options, before there is a run
    refused = isinstance(error, refusals if run is None else ResumeError)
    if refused or isinstance(error, metrics.DivergedError):
        if cluster.is_main():
            say(f"error: {error}")
        return entry.BAD_REQUEST if refused else DIVERGED
    shortage = memory_limits.shortage(error)
    if shortage is not None:
        remedy = f"try a smaller --batch-size than {batch_size}, or more memory"
        _leave(f"out of memory: {shortage}; {remedy}", say, run, OUT_OF_MEMORY)
    cuda_lines = [line for line in map(str.strip, str(error).splitlines()) if _CUDA.match(line)]
    if cuda_lines and isinstance(error, RuntimeError):
        traceback.print_exception(type(error), error, error.__traceback__)
        _leave(f"a GPU failed: {cuda_lines[-1]}", say, run, FAILED)
    raise error


def _not_saved(say: Say, run: Run) -> int:
    newest = run.checkpointer.paths()[-1:]
    checkpoint = f"the newest checkpoint is {newest[0]}" if newest else "there is no checkpoint"
    files = f"{len(run.lost)} file{'s' * (len(run.lost) > 1)}"
    say(f"error: {files} could not be written, at last {run.lost[-1]}; {checkpoint}")
    return NOT_SAVED


def _interrupted(say: Say, run: Run | None) -> int:
    saved = ", ".join([*run.kept, *map(str, run.checkpointer.paths())] if run else [])
    outcome = f"saved: {saved}" if saved else "nothing was saved (--save-dir DIR saves each epoch)"
    if cluster.is_main():
        say(f"interrupted; {outcome}", before="\n")  # ends the line of the progress bar
    cluster.abort("was interrupted")
    return entry.INTERRUPTED


def _how_to_resume(run: Run | None) -> str:
    paths = run.checkpointer.paths() if run else []
    return f"--resume continues from {paths[-1]}" if paths else ""


def _leave(reason: str, say: Say, run: Run | None, code: int) -> NoReturn:
    """End the process with one line that says what happened, and how to resume."""
    message = "; ".join(filter(None, [reason, _how_to_resume(run)]))
    cluster.abort(f"failed: {message}" if code == FAILED else f"ran {message}")
    say(f"error: {message}")
    os._exit(code)  # at exit MXNet might wait for ever, or abort
