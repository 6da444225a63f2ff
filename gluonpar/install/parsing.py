"""A parser of command lines whose errors are one line and name the option to correct."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, Iterable, NoReturn, Sequence

from gluonpar.install.entry import BAD_REQUEST


class Parser(argparse.ArgumentParser):
    """argparse's parser, with help that is printed as it is written."""

    def __init__(self, **more: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the options; if one is unknown, exit and name the most similar option."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            known = re.findall(r"--[a-z-]+", self.format_help())
            self.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(name, known)}")
        return options

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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message that suggests one of ``known``, or nothing if none is alike.

    >>> did_you_mean("trian", ["train", "doctor"])
    '; did you mean train?'
    """
    alike = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {alike[0]}?" if alike else ""
