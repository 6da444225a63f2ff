"""What a report's figures say, in words: findings as the doctor's, each computed from figures."""

from __future__ import annotations

import itertools
from typing import Any, Iterator

from gluonpar.diagnostics.benchmark.steps import OURS, PEERS
from gluonpar.diagnostics.doctor.checks import NOTE, OK, WRONG
from gluonpar.diagnostics.doctor.command import Finding

CHOICE_TOLERANCE = 1.1  # a choice is good if it takes at most so many times as long as the fastest
LOSS_TOLERANCE = 0.05  # relative; TF32 may change some thousandths, a missing gradient a tenth
MOST_EFFICIENCY = 1.1  # more is not noise: devices that compute together are no faster for it
FEW_SAMPLES = 5

Report = dict


def conclude(report: Report) -> list[Finding]:
    """Return the findings, those that are wrong first."""
    parts = [_devices, _doctor, _self_test, _failed, _wrong_sums, _losses, _peers]
    if not simulated(report):
        parts += [_few_samples, _choices, _scaling, _trainers]
    findings = [finding for part in parts for finding in part(report)]
    return sorted(findings, key=lambda finding: (WRONG, NOTE, OK).index(finding.state))


def on_gpus(report: Report) -> bool:
    """Return whether the devices are GPUs."""
    return any(name.startswith("gpu") for name in report["devices"]["names"])


def simulated(report: Report) -> bool:
    """Return whether the devices are GPUs of a simulator, which says so in their names."""
    return on_gpus(report) and any("simulated" in gpu.lower() for gpu in report["machine"]["gpus"])


def _devices(report: Report) -> Iterator[Finding]:
    if simulated(report):
        text = "simulated GPUs: times mean nothing, and no finding is based on them"
        yield Finding("devices", NOTE, text)
    elif not on_gpus(report):
        yield Finding("devices", NOTE, "CPU devices: their times say nothing about GPUs")


def _doctor(report: Report) -> Iterator[Finding]:
    for found in report["doctor"]:
        if found["state"] != OK:
            yield Finding(**{**found, "topic": f"doctor: {found['topic']}"})


def _self_test(report: Report) -> Iterator[Finding]:
    found = report["self test"]
    for failure in found["failures"]:
        yield Finding("self test", WRONG, failure, "gluonpar doctor")
    if not found["failures"] and not any(each["part"] == "self test" for each in report["failed"]):
        yield Finding("self test", OK, f"{len(found['lines'])} checks, nothing is wrong")


def _failed(report: Report) -> Iterator[Finding]:
    for failed in report["failed"]:
        candidate = failed["candidate"]
        what = f"with {candidate} " if candidate else ""
        text = f"{what}on {number(failed['num_devices'])}: {failed['how']}"
        state = NOTE if candidate and candidate.startswith("mxnet") else WRONG
        yield Finding(failed["part"], state, text)


def _wrong_sums(report: Report) -> Iterator[Finding]:
    for row in report["all-reduce"]["rows"]:
        if row["wrong"]:
            text = f"{row['name']}, {size(row['num_bytes'])}: {row['wrong']} elements are wrong"
            yield Finding("all-reduce", WRONG, text)


def _losses(report: Report) -> Iterator[Finding]:
    for title, rows in _settings(report):
        losses = {row["name"]: row["loss"] for row in rows}
        first, *others = losses.values()
        if all(_close(loss, first) for loss in losses.values()):
            continue
        text = ", ".join(f"{name} {loss}" for name, loss in losses.items())
        yield Finding(title, WRONG, f"after the same steps the losses are {text}")


def _close(loss: float | None, other: float | None) -> bool:
    """Return whether two losses agree; None is one that is not finite."""
    if loss is None or other is None:
        return False
    return abs(loss - other) <= LOSS_TOLERANCE * abs(other)


def _peers(report: Report) -> Iterator[Finding]:
    gpus = [gpu["index"] for gpu in report["devices"]["gpus"]]
    enabled = {tuple(pair) for pair in report["devices"]["peers"]}
    pairs = [*itertools.combinations(gpus, 2)]
    staged = [f"{i}-{j}" for i, j in pairs if not {(i, j), (j, i)} <= enabled]
    if staged:
        text = f"no peer access between {', '.join(staged)}: copies go through the host's memory"
        yield Finding("peer access", NOTE, text)
    elif pairs:
        yield Finding("peer access", OK, "between all pairs of GPUs")


def _few_samples(report: Report) -> Iterator[Finding]:
    for part in ("copies", "all-reduce", "steps"):
        fewest = min((len(row["seconds"]) for row in report[part]["rows"]), default=FEW_SAMPLES)
        if fewest < FEW_SAMPLES:
            text = f"short of time: the fewest samples of a median are {fewest}, and times vary"
            yield Finding(part, NOTE, text, "give it more --seconds")


def _choices(report: Report) -> Iterator[Finding]:
    """Compare the all-reduce that is chosen with the fastest, size by size."""
    for choice in report["all-reduce"]["choices"]:
        rows = report["all-reduce"]["rows"]
        seconds = {
            row["name"]: row["median_seconds"]
            for row in rows
            if row["num_bytes"] == choice["num_bytes"]
        }
        chosen, what = choice["algorithm"], size(choice["num_bytes"])
        if chosen not in seconds:
            yield Finding("all-reduce", WRONG, f"{what}: {chosen} is chosen, but has failed")
            continue
        fastest = min(seconds, key=seconds.get)
        ratio = seconds[chosen] / seconds[fastest]
        if fastest == chosen:
            text = f"{what}: the choice, {chosen}, is the fastest: {_us(seconds[chosen])}"
        else:
            text = (
                f"{what}: the choice, {chosen}, takes {ratio:.2f} times as long as the fastest, "
                f"{fastest}: {_us(seconds[chosen])} and {_us(seconds[fastest])}"
            )
        yield Finding("all-reduce", OK if ratio <= CHOICE_TOLERANCE else NOTE, text)


def _scaling(report: Report) -> Iterator[Finding]:
    """Compare K devices' images per second with K times those of one."""
    speeds = {
        (row["workload"], row["num_devices"]): row["images_per_second"]
        for row in report["steps"]["rows"]
        if row["name"] == OURS
    }
    for (workload, k), speed in speeds.items():
        if k > 1 and (workload, 1) in speeds:
            times, title = speed / speeds[workload, 1], f"{workload} on {k} devices"
            text = f"{times:.2f} times the images/s of one device"
            if times <= MOST_EFFICIENCY * k:
                yield Finding(title, OK, f"{text}: efficiency {times / k:.0%}")
                continue
            text = f"no result: {text} cannot be; the machine was busy when one was measured"
            yield Finding(title, NOTE, text, "measure again while nothing else runs")


def _trainers(report: Report) -> Iterator[Finding]:
    """Compare gluonpar's step with the fastest of MXNet's."""
    for title, rows in _settings(report):
        seconds = {row["name"]: row["median_seconds"] for row in rows}
        peers = [name for name in seconds if name in PEERS]
        if OURS in seconds and peers:
            peer = min(peers, key=seconds.get)
            ratio = seconds[OURS] / seconds[peer]
            times = f"{1e3 * seconds[OURS]:.2f} ms and {1e3 * seconds[peer]:.2f} ms"
            text = f"gluonpar takes {ratio:.2f} times as long as {peer}: {times}"
            yield Finding(title, OK if ratio <= CHOICE_TOLERANCE else NOTE, text)


def _settings(report: Report) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Give the rows of each workload and number of devices."""

    def setting(row: dict[str, Any]) -> tuple[str, int]:
        return row["workload"], row["num_devices"]

    for (workload, k), rows in itertools.groupby(report["steps"]["rows"], setting):
        yield f"{workload} on {number(k)}", [*rows]


def number(num_devices: int) -> str:
    """Return "1 device" or "2 devices"."""
    return f"{num_devices} device{'s' if num_devices > 1 else ''}"


def size(num_bytes: int) -> str:
    """Return a number of bytes in binary units.

    >>> size(4096), size(64 << 20)
    ('4 KiB', '64 MiB')
    """
    exponent = min(3, (num_bytes.bit_length() - 1) // 10)
    return f"{num_bytes / (1 << 10 * exponent):g} {('bytes', 'KiB', 'MiB', 'GiB')[exponent]}"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us"
