"""The choice of an algorithm: on GPUs the plan that is fastest by simulation on measured links."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives import arguments, links, probing, registry
from gluonpar.collectives.links import MeasuredLinks
from gluonpar.collectives.simulator import simulate
from gluonpar.runtime import nccl, peers

VARIABLE = "GLUONPAR_LINKS"
# Where nothing is measured. They follow from small arrays on two CPU contexts (docs/algorithms.md);
# the bandwidth is that of PCIe 3.0 with 16 lanes.
ASSUMED_SECONDS, ASSUMED_BANDWIDTH = 1e-4, 10e9


class Choice(NamedTuple):
    """An algorithm's name and the reason for choosing it; printed as one sentence."""

    algorithm: str
    why: str

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


def choose(kind: arguments.Kind) -> Choice:
    """Choose an algorithm by the arrays' storage, contexts, number and bytes."""
    if kind.stype == "row_sparse":
        return Choice("row_sparse", "rows are sent to the first device, added, and sent back")
    if on_host(kind.ctx):
        return Choice("host", "all arrays are in the host's memory, so it can sum them in place")
    if len(kind.ctx) == 1:
        return Choice("star", "there is one array, and nothing to send")
    by_nccl = kind.dtype.name in nccl.DTYPES and not nccl.refusal(kind.ctx)
    if by_nccl and peers.between_all(kind.ctx):
        return Choice("nccl", "NCCL is installed, and there is peer access between all GPUs")
    return _fastest(tuple(kind.ctx), kind.num_bytes, _plans(), _source())


def on_host(ctx: Sequence[mx.Context]) -> bool:
    """Return whether all arrays are in the host's memory."""
    return not any("gpu" in context.device_type for context in ctx)


def check_algorithm(name: str | None, ctx: Sequence[mx.Context]) -> None:
    """Raise ValueError unless the algorithm is registered and can be used on these contexts.

    Without a name, raise it if GLUONPAR_LINKS names a file that does not have their links.
    """
    if name is None and not on_host(ctx) and _source() not in ("off", "measure"):
        _links(tuple(ctx), _source())
    reason = _refusal(registry.named(name).name, ctx) if name is not None else ""
    if reason:
        advice = "leave it out, or name another algorithm"
        raise ValueError(f"algorithm={name!r} {reason}; {advice}")


def usable(ctx: Sequence[mx.Context]) -> list[str]:
    """Return the names of the registered algorithms that can be used on these contexts."""
    return [name for name in registry.ALGORITHMS if not _refusal(name, ctx)]


def _refusal(name: str, ctx: Sequence[mx.Context]) -> str:
    """Return why the algorithm cannot be used on these contexts; "" if it can."""
    gpus = [context for context in ctx if "gpu" in context.device_type]
    if name == "host" and gpus:
        return f"must be given CPU contexts only, got {gpus[0]}, whose memory the host cannot read"
    return nccl.refusal(ctx) if name == "nccl" else ""


def estimates(measured: MeasuredLinks, num_bytes: float) -> dict[str, float]:
    """Return the seconds of each algorithm with a plan by simulation on ``measured``, in order.

    Added to the simulated time is that of the calling thread, which starts one message after the
    other. Of equally fast plans, the one registered first comes first.
    """
    topology, k = measured.topology(), len(measured.devices)
    seconds = {}
    for name in _plans():
        found = simulate(name, k, num_bytes, topology, measured.memory_bandwidth)
        seconds[name] = found.seconds + len(found.hops) * measured.message_seconds
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def _plans() -> tuple[str, ...]:
    return tuple(name for name, one in registry.ALGORITHMS.items() if one.plan is not None)


def assumed(devices: Sequence[str]) -> MeasuredLinks:
    """Return the figures that are used where nothing is measured: they are always the same."""
    k = len(devices)
    latency, bandwidth = np.full((k, k), ASSUMED_SECONDS), np.full((k, k), ASSUMED_BANDWIDTH)
    own = np.full(k, 2 * ASSUMED_BANDWIDTH)
    return MeasuredLinks(
        [*devices], latency, bandwidth, bandwidth, own, own, np.inf, ASSUMED_SECONDS
    )


def _source() -> str:
    """Return 'off', 'measure' or the path of a file.

    What was measured differs a little from process to process, and so may the choice, and with it
    the order of additions: results that must repeat are made with figures that do.
    """
    if os.environ.get("MXNET_ENFORCE_DETERMINISM", "0") not in ("", "0"):
        return "off"
    return os.environ.get(VARIABLE) or "measure"


@functools.lru_cache(1024)
def _fastest(
    ctx: tuple[mx.Context, ...], num_bytes: int, plans: tuple[str, ...], source: str
) -> Choice:
    measured, whence = _links(ctx, source)
    (name, seconds), *others = estimates(measured, num_bytes).items()
    after = f"; {others[0][0]} {_ms(others[0][1])}" if others else ""
    time = f"{_ms(seconds)} by simulation on {whence}{after}"
    return Choice(name, f"{num_bytes} bytes per device take {time}")


@functools.lru_cache(64)
def _links(ctx: tuple[mx.Context, ...], source: str) -> tuple[MeasuredLinks, str]:
    names = [str(context) for context in ctx]
    if source == "off" or len({*names}) < len(names):
        return assumed(names), f"assumed links ({_figures(assumed(names))})"
    if source == "measure":
        seconds = probing.measure(ctx)
        measured = probing.links(names, probing.NUM_BYTES, probing.BURST, seconds)
        return measured, f"the links as measured ({_figures(measured)})"
    try:
        measured = links.read(source).between(names)
    except (OSError, ValueError) as error:
        advice = f"correct {VARIABLE}={source}, or set it to off"
        raise ValueError(f"{error}; {advice}") from error
    return measured, f"the links of {source} ({_figures(measured)})"


def _figures(measured: MeasuredLinks) -> str:
    apart = ~np.eye(len(measured.devices), dtype=bool)
    latency, bandwidth = 1e6 * measured.latency[apart], measured.bandwidth[apart] / 1e9
    message = 1e6 * measured.message_seconds
    return f"{_range(latency)} us and {_range(bandwidth)} GB/s each, {message:.3g} us to start one"


def _range(values: np.ndarray) -> str:
    low, high = f"{values.min():.3g}", f"{values.max():.3g}"
    return low if low == high else f"{low} to {high}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
