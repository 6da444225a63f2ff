"""What the walkthrough prints in several lines: tables, and the words that follow from figures."""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy as np
import walkthrough_timing as timing
from mxnet import nd


def values(arrays: Sequence[nd.NDArray]) -> None:
    """Print the one number of each array, by context."""
    print({str(array.context): int(array.asscalar()) for array in arrays})


def runs(found: Mapping[int, tuple], num_threads: Mapping[int, int]) -> None:
    """Print a line for each run of ``train``, by its number of devices."""
    print("devices  threads  loss of the last epoch  test accuracy  sec/epoch")
    for count, (history, accuracy, seconds) in found.items():
        last = history[-16:].mean()  # an epoch is 16 steps
        print(f"{count:7}  {num_threads[count]:7}  {last:22.4f}  {accuracy:13.3f}  {seconds:9.2f}")


def step_times(times: timing.Times) -> None:
    """Print the median of each setting's samples, the smallest and the largest."""
    for network in timing.NETWORKS:
        print(f"{network}, ms per step: median (smallest to largest)")
        for name, of_networks in times.items():
            ms = of_networks[network]
            spread = f"({min(ms):.1f} to {max(ms):.1f})"
            print(f"{np.median(ms):7.1f}  {spread:18} {name}")


def gains(times: timing.Times) -> None:
    """Print what each change gains, whether that is more than noise, and how the gain comes about.

    A change is "faster" or "slower" if all samples after it are on one side of all samples before.
    """
    for network in timing.NETWORKS:
        print(f"{network}, times as fast")
        for change, settings in timing.COMPARISONS.items():
            before, after = (times[setting][network] for setting in settings)
            gain = np.median(before) / np.median(after)
            print(f"{gain:7.2f}  {verdict(before, after):14} {change}")
        half, one, two = (
            np.median(times[setting][network]) for setting in (timing.HALF, timing.ALL, timing.TWO)
        )
        factors = f"{half / one:.2f} (cores) x {one / two:.2f} (second device)"
        print(f"{half / two:7.2f}  = {factors}")


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Return "faster" or "slower" if no sample contradicts it, otherwise "within noise"."""
    if max(after) < min(before):
        return "faster"
    return "slower" if min(after) > max(before) else "within noise"


def bandwidths(
    measured: Mapping[str, Sequence[Sequence[float]]], sizes: Sequence[int], num_devices: int
) -> None:
    """Print median (ms), algbw and busbw of each algorithm and size, and the ring beside the star.

    ``measured`` are samples in ms, by algorithm and size.
    """
    print("   bytes  algorithm        ms  algbw GB/s  busbw GB/s")
    for i, size in enumerate(sizes):
        for name, samples in measured.items():
            milliseconds = np.median(samples[i])
            algbw = size / milliseconds / 1e6
            busbw = algbw * 2 * (num_devices - 1) / num_devices
            print(f"{size:8}  {name:9} {milliseconds:9.2f} {algbw:11.3f} {busbw:11.3f}")
    ring_and_star(measured["ring"], measured["star"], sizes)


def ring_and_star(
    rings: Sequence[Sequence[float]], stars: Sequence[Sequence[float]], sizes: Sequence[int]
) -> None:
    """Print by size how long the ring takes beside the star, and a sentence that follows.

    The ring is slower or faster if the middle halves of the samples do not overlap.
    """
    found: dict[str, list] = {}
    for size, ring, star in zip(sizes, rings, stars):
        ratio = np.median(ring) / np.median(star)
        word = verdict(*(np.percentile(samples, (25, 75)) for samples in (star, ring)))
        print(f"{size} bytes: the ring takes {ratio:.2f} times as long as the star, {word}")
        found.setdefault(word, []).append(str(size))
    how = {"slower": "slower", "faster": "faster", "within noise": "neither slower nor faster"}
    parts = [
        f"{how[word]} with {', '.join([*some[:-2], ' and '.join(some[-2:])])} bytes"
        for word, some in found.items()
    ]
    print(f"Here the ring, compared with the star, is {', and '.join(parts)}.")
