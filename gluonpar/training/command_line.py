"""The command line of `gluonpar train` and the scripts: options, messages and exit codes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import traceback
from typing import Any, Callable, Sequence

from gluonpar import cluster, metrics
from gluonpar.install import __version__, entry, memory_limits
from gluonpar.runtime import interrupts
from gluonpar.training.checkpointing import ResumeError, Terminated
from gluonpar.training.configuration import TYPES, Configuration
from gluonpar.training.console import Console
from gluonpar.training.run import Run

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

# The options under the headings of --help, and the options with two names.
GROUPS = {
    "devices": "num_gpus gpus device weights algorithm",
    "training": "model batch_size lr num_epochs seed deterministic early_stop",
    "data": "dataset data_dir limit",
    "output": "log_interval save_dir save_every keep resume onnx plot profile dry_run",
}
ALIASES = {"num_epochs": ["--epochs", "--num-epochs"], "algorithm": ["--algorithm", "--allreduce"]}

NOTHING = "nothing was saved (--save-dir DIR saves checkpoints)"
Say = Callable[..., None]  # prints a message on stderr

# A line of MXNet's messages about CUDA, but not a line of its traceback.
_CUDA = re.compile(r"(?!File )(.*\W)?(cuda|cudnn|cublas|curand|nccl)", re.IGNORECASE)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Train with the options ``argv`` (default: the process's arguments); return the exit code.

    ``prog`` is the program's name in messages (default: the script's). The exit codes are
    :data:`EXIT_CODES`. For all codes from 2, except 141, one line on stderr has the reason, the
    remedy and what was saved.
    """
    parsed = parser(prog)
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
        with run.termination.by_signal():
            run.train()
    except BrokenPipeError:
        cluster.abort("could not print")
        return entry.BROKEN_PIPE
    except KeyboardInterrupt:
        if cluster.is_main():  # the line break ends the progress bar
            say(f"interrupted; {_how_to_resume(run) or NOTHING}", before="\n")
        cluster.abort("was interrupted")
        return entry.INTERRUPTED
    except Terminated:
        if cluster.is_main():
            say(f"ended by SIGTERM; {_how_to_resume(run) or NOTHING}")
        return TERMINATED
    except Exception as error:
        return _failed(error, say, run, options.batch_size)
    if console.failure:
        say(f"error: the output could not be written: {console.failure}")
    if run.lost:
        say(f"error: files that could not be written: {', '.join(dict.fromkeys(run.lost))}")
    return NOT_SAVED if console.failure or run.lost else TRAINED


def parser(prog: str | None) -> entry.Parser:
    """Return the parser; it stores options under the names of :class:`Configuration`'s fields."""
    description, _, examples = ABOUT.partition("\n")
    made = entry.Parser(
        prog=prog,
        usage="%(prog)s [OPTION ...]",  # a list of all options would take fifteen lines
        description=description,
        examples=examples,
        exit_codes=EXIT_CODES,
    )
    made.add_argument("--version", action="version", version=f"gluonpar {__version__}")
    fields = {field.name: field for field in dataclasses.fields(Configuration)}
    for title, names in GROUPS.items():
        group = made.add_argument_group(title)
        for name in names.split():
            flags = ALIASES.get(name, [f"--{name.replace('_', '-')}"])
            how: dict[str, Any] = {**fields[name].metadata, "default": fields[name].default}
            kind = str(fields[name].type).partition(" | ")[0]
            if kind == "bool":
                how = {"help": how["help"], "action": "store_true"}
            elif name == "resume":
                how.update(nargs="?", const="")
            else:
                convert = TYPES[kind][-1]
                is_list = kind.startswith("tuple")
                how["type"] = functools.partial(_numbers, convert) if is_list else convert
            group.add_argument(*flags, dest=name, **how)
    return made


def _numbers(kind: Callable, text: str) -> tuple:
    try:
        return tuple(map(kind, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 1,2, got {text!r}") from None


def _failed(error: Exception, say: Say, run: Run | None, batch_size: int) -> int:
    """Explain an exception and return the exit code; raise it again if it has no explanation.

    Out of memory, or after a GPU's failure, the process ends here.
    """
    refusals = (ValueError, FileNotFoundError, ImportError)  # of the options, before there is a run
    refused = isinstance(error, refusals if run is None else ResumeError)
    if refused or isinstance(error, metrics.DivergedError):
        if cluster.is_main():
            say(f"error: {error}")
        return entry.BAD_REQUEST if refused else DIVERGED
    shortage = memory_limits.shortage(error)
    cuda_lines = [line for line in map(str.strip, str(error).splitlines()) if _CUDA.match(line)]
    if shortage is not None:
        remedy = f"try a smaller --batch-size than {batch_size}, or more memory"
        code, reason = OUT_OF_MEMORY, f"out of memory: {shortage}; {remedy}"
    elif cuda_lines and isinstance(error, RuntimeError):
        traceback.print_exception(type(error), error, error.__traceback__)
        code, reason = FAILED, f"a GPU failed: {cuda_lines[-1]}"
    else:
        raise error
    message = "; ".join(filter(None, [reason, _how_to_resume(run)]))
    cluster.abort(f"failed: {message}" if code == FAILED else f"ran {message}")
    say(f"error: {message}")
    os._exit(code)  # at exit MXNet might wait for ever, or abort


def _how_to_resume(run: Run | None) -> str:
    paths = run.checkpointer.paths() if run else []
    return f"--resume continues from {paths[-1]}" if paths else ""
