"""gluonpar bench --links: what messages between each two devices take, as tables and heat maps."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Sequence

import mxnet as mx
import numpy as np

from gluonpar.collectives import choice, drawing, probing
from gluonpar.collectives.links import MeasuredLinks
from gluonpar.diagnostics import harness
from gluonpar.diagnostics.harness import Samples
from gluonpar.runtime import devices, peers, threads
from gluonpar.training.console import Console

OF_ALLREDUCE = ("min_bytes", "factor", "dtype", "op", "calls", "check", "algorithms")
SIZES = {"4 KB": 4e3, "1 MB": 1e6, "100 MB": 1e8}
TITLES = {
    "latency": "latency, us: a copy of 4 bytes",
    "bandwidth": "bandwidth, GB/s: one copy at a time",
    "at_once": "bandwidth, GB/s: every device sends one and receives one",
}
UNITS = {"latency": 1e6, "bandwidth": 1e-9, "at_once": 1e-9}


@dataclass(frozen=True)
class LinkSetting:
    """What is measured, between which devices, how often, and a notice on the devices."""

    ctx: Sequence[mx.Context]
    num_bytes: int
    rounds: int
    warmup: int
    notice: str


@dataclass(frozen=True)
class LinkSamples:
    """The samples of one measurement, of :func:`gluonpar.collectives.probing.measure`."""

    what: str
    devices: tuple[str, ...]
    samples: Samples

    def as_dict(self) -> dict[str, Any]:
        """Return everything, with all samples, for JSON."""
        return {"what": self.what, "devices": self.devices, **self.samples.as_dict()}


def prepare(options: argparse.Namespace, defaults: argparse.Namespace) -> LinkSetting:
    """Return the setting; ValueError for one device, and for options of the all-reduce alone."""
    for name in OF_ALLREDUCE:
        if getattr(options, name) != getattr(defaults, name):
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with --links")
    if options.num_gpus < 2:
        raise ValueError(f"--num-gpus must be at least 2 with --links, got {options.num_gpus}")
    if not 4 <= options.max_bytes < 4 << 31:
        raise ValueError(f"--max-bytes must be from 4 to {(4 << 31) - 1}, got {options.max_bytes}")
    chosen = devices.choose(num_gpus=options.num_gpus, device=options.device)
    return LinkSetting(chosen.ctx, options.max_bytes, options.rounds, options.warmup, chosen.notice)


def measure(setting: LinkSetting, console: Console, record: harness.Record) -> list[str]:
    """Print the tables and what follows for the all-reduce."""
    if setting.notice:
        console.notice(setting.notice)
    ctx, num_bytes = setting.ctx, setting.num_bytes
    how = threads.describe(ctx) or "; ".join([*record.machine["gpus"], peers.describe(ctx)])
    rounds = f"{setting.rounds} rounds after {setting.warmup} to warm up, medians"
    rows = {"devices": f"{list(ctx)}, {how}", "messages": f"copies of {num_bytes} bytes, {rounds}"}
    record.header(console, rows)
    bar = harness.progress_bar("links")
    seconds = probing.measure(ctx, num_bytes, setting.rounds, setting.warmup, 1, bar)
    for what, found in seconds.items():
        for places, values in found.items():
            names = tuple(str(ctx[i]) for i in places)
            record.rows.append(LinkSamples(what, names, Samples(tuple(values))))
    measured = summary(record.rows, num_bytes)
    record.more["links"] = measured.as_dict()
    record.write()
    for name, title in TITLES.items():
        console.line(f"\n{title}; from each device on the left to each above")
        table(console, measured.devices, UNITS[name] * getattr(measured, name))
    outgoing, incoming = measured.outgoing / 1e9, measured.incoming / 1e9
    console.line("\ntwo copies of one device at once, GB/s: out, in")
    for name, *both in zip(measured.devices, outgoing, incoming):
        console.line(f"{name:>8} {both[0]:8.3g} {both[1]:8.3g}")
    console.line(
        f"\nsums: {measured.memory_bandwidth / 1e9:.3g} GB/s read and written; starting a message "
        f"and its sum: {1e6 * measured.message_seconds:.3g} us of the calling thread"
    )
    console.line("\nall-reduce by simulation on these links, the fastest first")
    for size, count in SIZES.items():
        found = choice.estimates(measured, count)
        times = ", ".join(f"{name} {1e3 * found[name]:.3g}" for name in found)
        console.line(f"{size:>8}, ms: {times}")
    return []


def summary(rows: Sequence[LinkSamples], num_bytes: int) -> MeasuredLinks:
    """Return latencies and bandwidths of copies of ``num_bytes``."""
    names = [*dict.fromkeys(row.devices[0] for row in rows if row.devices)]
    seconds: dict[str, dict] = {}
    for row in rows:
        places = tuple(map(names.index, row.devices))
        seconds.setdefault(row.what, {})[places] = row.samples.values
    return probing.links(names, num_bytes, 1, seconds)


def table(console: Console, names: Sequence[str], values: np.ndarray) -> None:
    """Print a matrix with the devices' names; its diagonal is left empty."""
    width = max(8, *map(len, names))
    console.line(" ".join([" " * width, *(f"{name:>{width}}" for name in names)]))
    for i, name in enumerate(names):
        cells = ("" if i == j else f"{value:.3g}" for j, value in enumerate(values[i]))
        console.line(" ".join(f"{cell:>{width}}" for cell in (name, *cells)).rstrip())


def plot(options: argparse.Namespace, rows: Sequence[LinkSamples]) -> None:
    """Draw a heat map of each matrix: a row per sender, a column per receiver, with figures."""
    measured = summary(rows, options.max_bytes)
    k, title = len(measured.devices), f"Links between {len(measured.devices)} devices"
    side = max(2.6, 0.55 * k)
    with drawing.style(title):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3 * side + 2.6, side + 1.3))
        for column, name in enumerate(TITLES):
            values = UNITS[name] * getattr(measured, name)
            values = np.where(np.eye(k, dtype=bool), np.nan, values)
            axes = figure.add_subplot(1, 3, column + 1)
            # Good is dark on every map: a short latency, a high bandwidth.
            better = "Blues_r" if name == "latency" else "Blues"
            low, high = np.nanmin(values), np.nanmax(values)
            margin = 0.35 * (high - low) or 1.0  # so that figures can be read on every colour
            axes.imshow(values, cmap=better, vmin=low - margin, vmax=high + margin)
            for i, j in zip(*np.nonzero(~np.isnan(values))):
                shade = (values[i, j] - low + margin) / (high - low + 2 * margin)
                dark = shade < 0.5 if name == "latency" else shade > 0.5
                colour = "white" if dark else "#1b1f24"
                axes.text(j, i, f"{values[i, j]:.3g}", ha="center", va="center", color=colour)
            axes.set_xticks(range(k), measured.devices, rotation=90 if k > 4 else 0)
            axes.set_yticks(range(k), measured.devices if column == 0 else [""] * k)
            axes.set_xlabel("to")
            axes.set_ylabel("from" if column == 0 else "")
            axes.grid(visible=False)
            axes.set_title(TITLES[name].replace(": ", "\n"), loc="left", size="small")
        figure.tight_layout()
        fastest = ", ".join(
            f"{n}: {next(iter(choice.estimates(measured, SIZES[n])))}" for n in SIZES
        )
        drawing.save(figure, options.plot, title, f"Fastest all-reduce by simulation: {fastest}.")
