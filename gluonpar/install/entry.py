"""What the commands share: options, messages and exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from typing import Any, Callable, NoReturn

BAD_REQUEST, INTERRUPTED, BROKEN_PIPE = 2, 130, 141
EXIT_CODES = {  # of all commands; each has its own meaning of 0 and 1
    BAD_REQUEST: "the request cannot be met; a line says why",
    INTERRUPTED: "interrupted (Ctrl-C)",
    BROKEN_PIPE: "nobody reads the output any more, as after | head -1",
}


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


class Parser(argparse.ArgumentParser):
    """argparse's parser, with errors of one line, and help that is printed as it is written.

    The help ends with ``examples``, one per line, and the meaning of ``exit_codes``, to which
    :data:`EXIT_CODES` are added.
    """

    def __init__(
        self, examples: str = "", exit_codes: dict[int, str] | None = None, **more: Any
    ) -> None:
        commands = [f"  {line}" for line in examples.strip().splitlines()]
        lines = ["examples:", *commands, ""] if commands else []
        if exit_codes:
            codes = sorted({**EXIT_CODES, **exit_codes}.items())
            lines += ["exit codes:", *(f"  {code:<5}{meaning}" for code, meaning in codes)]
        how = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=how, epilog="\n".join(lines), **more)

    def in_options(self, message: object) -> str:
        """Return the message of a function's error, with options in place of its arguments.

        >>> parser = Parser()
        >>> _ = parser.add_argument("--num-gpus")
        >>> parser.in_options("num_gpus=3, but there are 2; num_gpus must be at most 2")
        '--num-gpus 3, but there are 2; --num-gpus must be at most 2'
        """
        text = str(message)
        for action in self._actions:
            option, name = action.option_strings[0], action.dest
            # A name of one word, such as device, may be a word of the message.
            end = r"\b" if "_" in name else r"(?= (must|needs)\b)"
            text = re.sub(rf"(?<![\w./'-]){name}='?([^\s',]+)'?", rf"{option} \1", text)
            text = re.sub(rf"(?<![\w./'-]){name}{end}", option, text)
        return text

    def error(self, message: str) -> NoReturn:
        """Exit with one line on stderr."""
        self.exit(BAD_REQUEST, f"{self.prog}: error: {message}\n")
