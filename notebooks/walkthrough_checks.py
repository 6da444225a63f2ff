"""The checks of the walkthrough's exercises, which tell apart right, right but not good, and wrong.

Each takes the reader's function, calls it, and prints a verdict with the reason.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Callable, Sequence
from unittest import mock

import mxnet as mx
import numpy as np
from gluonpar import collectives
from gluonpar.plans.plan import by_step, chunks_sent, num_chunks, num_steps
from mxnet import nd

NUM_DEVICES = (2, 3, 4, 7)
Plan = Callable[[int], Sequence[collectives.Hop]]


def verdict(wrong: object = "", not_good: str = "") -> None:
    """Print what is wrong, or what is right but not good, or that the answer is right."""
    if wrong:
        print(f"Wrong: {wrong}.")
    else:
        print(f"Right, but not good: {not_good}." if not_good else "Right.")


def error_in(hops: Sequence[collectives.Hop], num_devices: int) -> str:
    """Return what the library says against a plan, or nothing if it is an all-reduce."""
    try:
        collectives.check(hops, num_devices)
    except ValueError as error:
        return str(error)
    return ""


def ring(plan: Plan) -> None:
    """Print a row per number of devices, and whether the plan is the ring."""
    is_the_ring = True
    for k in NUM_DEVICES:
        hops = plan(k)
        error = error_in(hops, k)
        chunks, steps = num_chunks(hops), num_steps(hops)
        at_once = max((max(chunks_sent(step).values()) for step in by_step(hops)), default=0)
        to_next = all(hop.dst == (hop.src + 1) % k for hop in hops)
        # An all-reduce of K chunks has 2K(K-1) hops or more: then every device sends in every step.
        shape = (chunks, steps, at_once) == (k, 2 * (k - 1), 1)
        is_the_ring &= not error and to_next and shape
        print(f"K = {k}: sums {f'WRONG: {error}' if error else 'right'}, chunks {chunks},", end=" ")
        print(f"steps {steps}, a device sends up to {at_once} per step,", end=" ")
        print("only to the next" if to_next else "NOT only to the next")
    print("This is the ring." if is_the_ring else "This is not the ring yet.")


def owners(plan: Plan) -> None:
    """Exercise 3: each chunk is summed by its owner, and all devices send the same amount."""
    not_good = ""
    for k in NUM_DEVICES:
        hops = plan(k)
        error = error_in(hops, k)
        if error:
            return verdict(error)
        where = [(hop.chunk, hop.dst if hop.reduce else hop.src) for hop in hops]
        places = Counter(chunk for chunk, _ in set(where))
        chunk, num_places = places.most_common(1)[0]
        device, sent = chunks_sent(hops).most_common(1)[0]
        arrays, enough = sent / num_chunks(hops), 2 * (k - 1) / k
        problem = ""
        if num_places > 1:
            problem = f"chunk {chunk} has {num_places} owners: add to one, and copy from it"
        elif arrays > enough:
            problem = f"device {device} sends {arrays:.3g} arrays, and {enough:.3g} are enough"
        elif num_steps(hops) > 2 * (k - 1):
            problem = f"there are {num_steps(hops)} steps, and {2 * (k - 1)} are enough"
        not_good = not_good or problem and f"with {k} devices, {problem}"
    return verdict(not_good=not_good)


def accuracy(count_correct: Callable) -> None:
    """Exercise 4: the count is right, each device computes its share, and few values are read."""
    ctx, random, sizes = [mx.cpu(0), mx.cpu(1)], np.random.RandomState(0), (8, 5, 8, 5)
    X = np.eye(4, dtype="float32")[random.randint(4, size=sum(sizes))]
    labels = random.randint(4, size=len(X)).astype("float32")
    ends = np.cumsum(sizes)[:-1]
    batches = [*zip(np.split(X, ends), np.split(labels, ends))]
    images: Counter = Counter()

    def model(X, params):
        images[X.context] += len(X)
        return nd.dot(X, params[0])

    device_params = [[nd.array(np.eye(4), ctx=c)] for c in ctx]
    counted = {"autospec": True, "side_effect": nd.NDArray.asnumpy}
    with mock.patch.object(nd.NDArray, "asnumpy", **counted) as reads:
        found = count_correct(batches, device_params, ctx, model)
    found = found.asscalar() if isinstance(found, nd.NDArray) else found
    expected = (X.argmax(axis=1) == labels).sum()
    if found != expected:
        return verdict(f"{expected} of {len(labels)} images are correct, got {found}")
    busiest, most = images.most_common(1)[0]
    if most > sum((size + 1) // 2 for size in sizes):
        return verdict(not_good=f"{busiest} computes {most} of {len(labels)} images")
    if reads.call_count > len(ctx):
        return verdict(not_good=f"it waits {reads.call_count} times, in {len(sizes)} batches")
    return verdict()


def batch_norm(normalize: Callable) -> None:
    """Exercise 5: outputs are those of one device, and each device has those of its shard."""
    ctx, random = [mx.cpu(0), mx.cpu(1)], np.random.RandomState(0)
    X = random.normal(1, 3, size=(7, 1, 2, 2)).astype("float32")
    outputs = normalize(X, ctx)
    found = np.concatenate([output.asnumpy() for output in outputs])
    if found.shape != X.shape:
        return verdict(f"outputs must have the shape {X.shape}, got {found.shape}")
    difference = np.abs(found - (X - X.mean()) / np.sqrt(X.var() + 1e-5)).max()
    if not difference < 1e-3:
        return verdict(f"one device and two differ by up to {difference:.3f}")
    places = Counter(output.context for output in outputs for _ in range(len(output)))
    device, most = places.most_common(1)[0]
    return verdict(not_good=f"{device} has {most} of {len(X)} outputs" if most > 4 else "")


def speeds(split: Callable) -> None:
    """Exercise 6: every sample is in one shard, and the devices finish at about the same time."""
    X, not_good = np.arange(256, dtype="float32"), ""
    for speeds in ((3, 1), (1, 3), (20, 1), (1, 2, 1)):
        ctx = [mx.cpu(i) for i in range(len(speeds))]
        shards = [shard for shard in split(X, speeds, ctx) if shard.size]
        samples = np.sort(np.concatenate([shard.asnumpy() for shard in shards]))
        if not np.array_equal(samples, X):
            return verdict(f"speeds {speeds}: the shards must have each of the 256 samples once")
        speed_of = dict(zip(ctx, speeds))
        longest = max(len(shard) / speed_of[shard.context] for shard in shards)
        times = longest / (len(X) / sum(speeds))
        if times > 1.06 and not not_good:  # a sample cannot be divided
            not_good = f"speeds {speeds}: a step takes {times:.2f} times as long as it could"
    return verdict(not_good=not_good)


def in_progress(run_steps: Callable) -> None:
    """Exercise 7: two steps are in progress at most, and the device always has something to do."""
    losses: list[nd.NDArray] = []  # of the steps that were queued
    before: list[int] = []  # how many steps are in progress when another is queued
    ended = 0  # a step is in progress until the loop waits for it

    def step(X, y):
        before.append(len(losses) - ended)
        losses.append(nd.zeros((1,)))
        return losses[-1:]

    def noted(wait):
        def noted_wait(*arrays):
            nonlocal ended
            if not arrays:
                number = len(losses)
            else:  # an array that is no loss was computed from the next one
                of_loss = (i for i, loss in enumerate(losses, 1) if loss is arrays[0])
                number = next(of_loss, ended + 1)
            ended = max(ended, min(number, len(losses)))
            return wait(*arrays)

        return noted_wait

    batches = [(np.zeros((2, 1)), np.zeros(2))] * 8
    with contextlib.ExitStack() as stack:
        for owner, name in ((nd.NDArray, "wait_to_read"), (nd.NDArray, "asnumpy"), (nd, "waitall")):
            stack.enter_context(mock.patch.object(owner, name, noted(getattr(owner, name))))
        run_steps(iter(batches), step)
    most, idle = max(before, default=0) + 1, before[1:].count(0)
    if len(before) != len(batches):
        return verdict(f"there are {len(batches)} batches, and {len(before)} steps were made")
    if most > 2:
        return verdict(f"{most} steps are in progress at a time")
    return verdict(
        not_good=f"before {idle} of {len(batches)} steps nothing is in progress" if idle else ""
    )
