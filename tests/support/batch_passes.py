"""The backward passes of a batch on several devices: their order, and what tells it from others."""

import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import mxnet as mx
from mxnet import autograd

import gluonpar

WAYS = ("one backward", "a loop", "a loop of backward", "the last device first")
# Several passes per device, each with a recording of its own: by which heads, and what else it is.
PASSES = {
    "attack": ("all", "all"),  # the first pass is for the gradient with respect to the input
    "inner step": ("all", "all"),  # of which the second is for other weights
    "a head first": ("a", "all"),
    "two losses": ("a", "b"),
    "three passes": ("b", "a", "all"),
    "retry": ("all",),  # on one device twice, which is nothing where passes add
}
CALLS = ("a loop", "run_tasks", "a thread each")
# MXNet frees nothing of what it allocates for a thread, so they are the same for all programs.
THREAD, THREADS = ThreadPoolExecutor(1), [ThreadPoolExecutor(1) for _ in range(4)]


def on_another_thread(function, *arguments):
    return THREAD.submit(function, *arguments).result()


def backward(losses, way):
    """Call backward, in one of WAYS, of the devices' losses, which are all recorded."""
    if way == "one backward":
        autograd.backward(losses)
        return
    for each in losses[::-1] if way == "the last device first" else losses:
        each.backward()


def differentiate(loss, shards, way):
    """Compute the loss of each shard, and call backward, in one of WAYS."""
    if way == "a loop":
        for shard in shards:
            with autograd.record():
                losses = loss(shard)
            losses.backward()
    elif shards:
        with autograd.record():
            losses = [loss(shard) for shard in shards]
        backward(losses, way)


class Shard(NamedTuple):
    """A device's samples, the losses of both heads, of "a" and of "b", and the weights there."""

    X: mx.nd.NDArray
    losses: dict
    weights: list


def passes(shard, name, times):
    """Make the passes on one shard, one at a time; ``times`` the last one."""
    X, before = shard.X, []
    for i, heads in enumerate([*PASSES[name], *[PASSES[name][-1]] * (times - 1)]):
        X.attach_grad()
        with autograd.record():
            losses = shard.losses[heads](X)
        if losses is not None:  # it trains something
            losses.backward()
        if i == 0 and name == "attack":
            X = X + 0.1 * X.grad
        for weight, value in before:
            weight[:] = value
        if i == 0 and name == "inner step":
            before = [(weight, weight.copy()) for weight in shard.weights]
            for weight, value in before:
                weight[:] = value * 1.5
        yield


def turns(num_devices, way):
    """The devices of the passes, in their order."""
    name, called, number = way
    order = [i for i in range(num_devices) for _ in PASSES[name]]
    if name == "retry" and num_devices:
        order.insert(number % num_devices, number % num_devices)
    if called == "a thread each":
        random.Random(number).shuffle(order)
    return order


def call(shards, way, ctx):
    """Make several devices' passes, in the order of :func:`turns`."""
    name, called, _ = way
    order = turns(len(shards), way)
    more = [order.count(i) - len(PASSES[name]) + 1 for i in range(len(shards))]
    made = [passes(shard, name, times) for shard, times in zip(shards, more)]
    if called == "run_tasks" and shards:
        gluonpar.run_tasks(lambda each: [*each], made, ctx[: len(shards)])
        return
    for i in order:
        if called == "a thread each":
            THREADS[i].submit(next, made[i]).result()
        else:
            next(made[i])


class Batch(NamedTuple):
    """A batch on one rank: the thread and the devices of each pass; if one recording has all."""

    passes: list
    is_one_recording: bool


def batch_of(way, ctx, thread="the program's"):
    """Return the Batch that is differentiated so, if it has samples on ``ctx``."""
    if isinstance(way, tuple):
        threads = range(len(ctx)) if way[1] == "a thread each" else [thread] * len(ctx)
        made = [(threads[i], {ctx[i]}) for i in turns(len(ctx), way)]
        return Batch(made, way[1] == "run_tasks")
    if way == "one backward":
        return Batch([(thread, {*ctx})] * bool(ctx), True)
    order = ctx[::-1] if way == "the last device first" else ctx
    return Batch([(thread, {c}) for c in order], way != "a loop")


class CannotBeTold(Exception):
    """Nobody can tell this batch from the one before, which was left out.

    That is where it begins, in a recording of its own, on devices on which the other had no
    samples; or where its thread had ended the other one, if that is not the first device, or had
    fewer passes than another. Within a batch it is a pass that the first device makes again after
    other devices' passes, as it looks like a batch on the first device; and a gradient that only
    some devices' last passes overwrite, of which the other devices' count.
    """

    @classmethod
    def check(cls, before, now, first):
        """Raise this if ``now`` cannot be told from ``before``, both batches of one rank.

        ``first`` is the first device.
        """
        number = {}
        for _, ctx in () if now.is_one_recording else now.passes:
            is_again = ctx == {first} and number.get(first) == max(number.values(), default=0)
            if is_again and len(number) > 1:
                raise cls
            number.update({c: number.get(c, 0) + 1 for c in ctx})
        if not before.passes or not now.passes:
            return
        wrote = set().union(*(ctx for _, ctx in before.passes))
        thread, begins = now.passes[0]
        in_one = set().union(*(ctx for _, ctx in now.passes))
        if not wrote & (in_one if now.is_one_recording else begins):
            raise cls
        number = {c: sum(c in ctx for _, ctx in before.passes) for c in wrote}
        goes_on = first not in begins or number.get(first, 0) < max(number.values())
        if dict(before.passes).get(thread) == begins and goes_on and not wrote <= begins:
            raise cls
