"""trace: the hops of a plan, as a table or drawn as a picture."""

from __future__ import annotations

import html
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Iterable

from gluonpar.collectives import drawing, paper, registry
from gluonpar.collectives.plan import Hop, chunks_sent, num_chunks, num_steps

if TYPE_CHECKING:
    import os

    from matplotlib.figure import Figure


def trace(algorithm: str, num_devices: int) -> Trace:
    """The hops of ``algorithm`` between ``num_devices`` devices, to be printed or drawn.

    Raises ValueError for an unknown algorithm, for one without a plan and for less than one device.

    >>> print(trace("tree", 3))
    tree, 3 devices
    step 0  1 -> 0: chunk 0 (add)
    step 1  2 -> 0: chunk 0 (add)
    step 2  0 -> 2: chunk 0 (copy)
    step 3  0 -> 1: chunk 0 (copy)
    4 steps, 4 messages; each device sends, in arrays: 2, 1, 1
    """
    plan = registry.named(algorithm).plan
    if plan is None:
        others = ", ".join(a.name for a in registry.ALGORITHMS.values() if a.plan is not None)
        raise ValueError(f"algorithm {algorithm!r} has no hops to trace; these have: {others}")
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}; a plan is for 1 device or more")
    return Trace(algorithm, num_devices, tuple(plan(num_devices)))


@dataclass(frozen=True)
class Trace:
    """An algorithm's hops between ``num_devices`` devices; :func:`trace` makes one.

    ``print`` shows a row for each step, Jupyter a column for each device, :meth:`draw` a picture.
    """

    algorithm: str
    num_devices: int
    hops: tuple[Hop, ...]

    def __str__(self) -> str:
        rows = [_messages(h for h in self.hops if h.step == s) for s in self._steps()]
        width = max((len(message) for row in rows for message in row), default=0)
        lines = [
            f"step {s:<{len(str(len(rows) - 1))}}  "
            + "   ".join(message.ljust(width) for message in row).rstrip()
            for s, row in enumerate(rows)
        ]
        return "\n".join([self._title(), *lines, self._total()])

    def _repr_html_(self) -> str:
        devices = range(self.num_devices)
        lines = ["<tr><th>step</th>" + "".join(f"<th>device {i}</th>" for i in devices) + "</tr>"]
        for s in self._steps():
            sent = [
                _messages((h for h in self.hops if h[:2] == (s, i)), "to {dst}") for i in devices
            ]
            cells = "".join(f"<td>{'<br>'.join(messages)}</td>" for messages in sent)
            lines.append(f"<tr><th>{s}</th>{cells}</tr>")
        caption = f"<caption>{html.escape(self._title())}: who sends what</caption>"
        table = "\n".join(["<table>", caption, *lines, "</table>"])
        return f"{table}\n<p>{html.escape(self._total())}</p>"

    def draw(self, path: str | os.PathLike | None = None, dark: bool = False) -> Figure:
        """The hops as arrows from lane to lane, a column a step; written to ``path`` too, if given.

        The background is transparent and the colours read on white and on black; ``dark`` is for
        pages that are always dark and makes the words light. A path that ends in '.svg' gives words
        as outlines of the font that matplotlib brings, a group with the id
        'hop-STEP-SRC-DST-CHUNK-add' (or '-copy') for each hop, a title and a description for those
        who do not see it, and the same bytes whenever it is drawn by the same matplotlib. Nothing
        of matplotlib's global state is changed. Raises ImportError without matplotlib.
        """
        with paper.style(self._title()):
            figure = drawing.picture(self.hops, self.num_devices, self._title(), dark)
            if path is not None:
                words = drawing.description(self.hops, self.num_devices)
                paper.save(figure, path, self._title(), words)
        return figure

    def _steps(self) -> range:
        return range(num_steps(self.hops))

    def _title(self) -> str:
        return f"{self.algorithm}, {_count(self.num_devices, 'device')}"

    def _total(self) -> str:
        counts = chunks_sent(self.hops)
        sent = (str(Fraction(counts[i], num_chunks(self.hops))) for i in range(self.num_devices))
        return (
            f"{_count(num_steps(self.hops), 'step')}, {_count(len(self.hops), 'message')}; "
            f"each device sends, in arrays: {', '.join(sent)}"
        )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _messages(hops: Iterable[Hop], ends: str = "{src} -> {dst}") -> list[str]:
    """The hops in words, those with the same ends together."""
    chunks = defaultdict(list)
    for hop in sorted(hops):
        chunks[ends.format(src=hop.src, dst=hop.dst), hop.reduce].append(str(hop.chunk))
    return [
        f"{both}: chunk{'s' * (len(some) > 1)} {', '.join(some)} ({'add' if reduce else 'copy'})"
        for (both, reduce), some in chunks.items()
    ]
