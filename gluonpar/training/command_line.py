"""The command line of `gluonpar train` and the scripts: options, messages and exit codes."""

from __future__ import annotations

import os
import re
import traceback
from typing import Callable, Sequence

from gluonpar import cluster, metrics, options
from gluonpar.install import memory_limits
from gluonpar.runtime import interrupts
from gluonpar.training.checkpointing import ResumeError, Terminated
from gluonpar.training.history import Console
from gluonpar.training.run import Run

NOTHING = "nothing was saved (--save-dir DIR saves checkpoints)"
Say = Callable[..., None]  # prints a message on stderr

# A line of MXNet's messages about CUDA, but not a line of its traceback.
_CUDA = re.compile(r"(?!File )(.*\W)?(cuda|cudnn|cublas|curand|nccl)", re.IGNORECASE)


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Train with the options ``argv`` (default: the process's arguments); return the exit code.

    ``prog`` is the program's name in messages (default: the script's). The exit codes are those of
    :class:`gluonpar.options.Configuration`. For all codes from 2, except 141, one line on stderr
    has the reason, the remedy and what was saved.
    """
    parser, console = options.parser(options.Configuration, prog), Console()
    values = parser.parse_args(argv)

    def say(message: str, before: str = "") -> None:
        console.notice(f"{before}{parser.prog}: {parser.in_options(message)}")

    interrupts.end_at_crash()
    try:
        cluster.size()  # joins the other processes
    except (ImportError, RuntimeError, ValueError, MemoryError) as error:
        shortage = memory_limits.shortage(error)
        say(f"error: out of memory: {shortage}" if shortage else f"error: {error}")
        return options.OUT_OF_MEMORY if shortage else options.BAD_REQUEST
    run = None
    try:
        run = Run(cluster.together(lambda: options.Configuration(**vars(values))), console)
        with run.termination.by_signal():
            run.train()
    except BrokenPipeError:
        cluster.abort("could not print")
        return options.BROKEN_PIPE
    except KeyboardInterrupt:
        if cluster.is_main():  # the line break ends the progress bar
            say(f"interrupted; {_how_to_resume(run) or NOTHING}", before="\n")
        cluster.abort("was interrupted")
        return options.INTERRUPTED
    except Terminated:
        if cluster.is_main():
            say(f"ended by SIGTERM; {_how_to_resume(run) or NOTHING}")
        return options.TERMINATED
    except Exception as error:
        return _failed(error, say, run, values.batch_size)
    if console.failure:
        say(f"error: the output could not be written: {console.failure}")
    if run.lost:
        say(f"error: files that could not be written: {', '.join(dict.fromkeys(run.lost))}")
    return options.NOT_SAVED if console.failure or run.lost else 0


def _failed(error: Exception, say: Say, run: Run | None, batch_size: int) -> int:
    """Explain an exception and return the exit code; raise it again if it has no explanation.

    Out of memory, or after a GPU's failure, the process ends here.
    """
    refusals = (TypeError, ValueError, FileNotFoundError, ImportError)  # while the run is made
    refused = isinstance(error, refusals if run is None else ResumeError)
    if refused or isinstance(error, metrics.DivergedError):
        if cluster.is_main():
            say(f"error: {error}")
        return options.BAD_REQUEST if refused else options.DIVERGED
    code, shortage = options.OUT_OF_MEMORY, memory_limits.shortage(error)
    cuda_lines = [line for line in map(str.strip, str(error).splitlines()) if _CUDA.match(line)]
    if shortage is not None:
        remedy = f"try a smaller --batch-size than {batch_size}, or more memory"
        reason = f"out of memory: {shortage}; {remedy}"
    elif cuda_lines and isinstance(error, RuntimeError):
        traceback.print_exception(type(error), error, error.__traceback__)
        code, reason = 1, f"a GPU failed: {cuda_lines[-1]}"
    else:
        raise error
    message = "; ".join(filter(None, [reason, _how_to_resume(run)]))
    cluster.abort(f"failed: {message}" if code == 1 else f"ran {message}")
    say(f"error: {message}")
    os._exit(code)  # at exit MXNet might wait for ever, or abort


def _how_to_resume(run: Run | None) -> str:
    paths = run.checkpointer.paths() if run else []
    return f"--resume continues from {paths[-1]}" if paths else ""
