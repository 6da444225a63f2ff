"""Who sends which chunk to whom at which step: data, to be read, drawn and tested as such."""

from __future__ import annotations

from typing import NamedTuple


class Hop(NamedTuple):
    """At ``step``, device ``src`` sends its value of ``chunk`` to device ``dst``.

    The receiver adds it to its own value if ``reduce``, and else takes it over. Hops of one step
    are independent: none reads what another one of them writes.
    """

    step: int
    src: int
    dst: int
    chunk: int
    reduce: bool
