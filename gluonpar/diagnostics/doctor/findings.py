"""What one look at an installation says, and the two commands that most remedies end in."""

from __future__ import annotations

from typing import NamedTuple

OK, NOTE, WRONG = "ok", "note", "wrong"
CPU, CUDA = "pip install 'gluonpar[cpu]'", "pip install 'gluonpar[cu112]'"


class Finding(NamedTuple):
    """One thing seen. ``state``: 'ok'; 'note', worth knowing; 'wrong', something cannot work."""

    topic: str
    state: str
    text: str
    remedy: str = ""
