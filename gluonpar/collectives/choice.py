"""The choice of an algorithm: a rule of three lines.

- On CPU contexts 'host'.
- On GPUs 'nccl', if NCCL is installed and takes these GPUs: every array on a GPU of its own.
- Otherwise, and for CPUs and GPUs together, 'tree' for small arrays and 'ring' for large ones.

A message costs the calling thread about 0.1 ms; a connection carries about 1 MB in that time. The
tree has few messages, and the ring sends few bytes. The two take equally long for arrays of
(K-1)^2 / (ceil(log2 K) - (K-1) / K) MB (docs/algorithms.md): 2 MB for two devices, 7 MB for four,
23 MB for eight.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import mxnet as mx

from gluonpar.collectives.executor import named
from gluonpar.collectives.host import on_host
from gluonpar.plans import ALGORITHMS


class Choice(NamedTuple):
    """An algorithm's name and the reason for choosing it; printed as one sentence."""

    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


def choose(ctx: Sequence[mx.Context], num_bytes: int) -> Choice:
    """Choose an algorithm for dense arrays of ``num_bytes`` on each of ``ctx``."""
    if on_host(ctx):
        return Choice("host", "all arrays are in the host's memory, so it can sum them in place")
    k = len(ctx)
    if k == 1:
        return Choice("star", "there is one array, and nothing to send")
    refusal = named("nccl").refusal(ctx)
    if not refusal:
        return Choice("nccl", "NCCL is installed, and takes these GPUs")
    limit = 1e6 * (k - 1) ** 2 / ((k - 1).bit_length() - (k - 1) / k)
    if num_bytes < limit:
        name, reason = "tree", f"below {limit / 1e6:.3g} MB on {k} devices few messages are faster"
    else:
        name, reason = "ring", f"from {limit / 1e6:.3g} MB on {k} devices few bytes are faster"
    return Choice(name, f"{reason}; 'nccl' {refusal}")


def check_algorithm(name: str | None, ctx: Sequence[mx.Context]) -> None:
    """Raise ValueError unless the algorithm is registered and can be used on these contexts."""
    reason = named(name).refusal(ctx) if name is not None else ""
    if reason:
        raise ValueError(f"algorithm={name!r} {reason}; leave it out, or name another algorithm")


def usable(ctx: Sequence[mx.Context]) -> list[str]:
    """Return the names of the registered algorithms that can be used on these contexts."""
    return [name for name in ALGORITHMS if not named(name).refusal(ctx)]
