"""The exercises' solutions, by name; they are shown folded away, with what they print.

``tools/build_notebooks.py`` runs each of them after the cell that begins its exercise.
"""

# ruff: noqa: F821 - they go on from what the notebook has computed

# %% batch-size
for count, batch_size, rate in ((1, 256, 0.02), (2, 512, 0.02), (2, 512, 0.04)):
    history, accuracy, seconds = train(count, batch_size, rate, num_epochs=2)
    last = history[len(history) // 2 :].mean()
    print(f"devices {count}, batches of {batch_size}, lr {rate}: loss {last:.3f}")

# %% learning-rate
for rate in (0.01, 0.02, 0.04):
    ends = [train(count, lr=rate, num_epochs=1)[0][-8:].mean() for count in (1, 4)]
    print(f"lr {rate}: loss {ends[0]:.3f} on 1 device, {ends[1]:.3f} on 4")
    assert np.allclose(*ends, rtol=0.05)

# %% owners
collectives.ALGORITHMS.pop("owners", None)


@collectives.register("owners")
def owners(num_devices):
    """Chunk c is summed on device c, its owner, which then sends the sum to all others."""
    others, devices_of = range(1, num_devices), range(num_devices)
    collect = [
        Hop(s - 1, i, (i + s) % num_devices, (i + s) % num_devices, reduce=True)
        for s in others
        for i in devices_of
    ]
    spread = [
        Hop(num_devices + s - 2, i, (i + s) % num_devices, i, reduce=False)
        for s in others
        for i in devices_of
    ]
    return collect + spread


print(collectives.trace("owners", 4))
assert all(chunk == everybody for device in contributions(owners(4), 4) for chunk in device)
arrays = [nd.array(value, ctx=c) for value, c in zip(values, devices)]
gluonpar.allreduce(arrays, "owners")
assert all(np.array_equal(array.asnumpy(), values.sum(axis=0)) for array in arrays)

# %% accuracy
right = [nd.zeros((1,), ctx=c) for c in ctx]
for batch in data.batches(X_test, y_test, 256):
    for i, (X_shard, y_shard) in enumerate(gluonpar.split_and_load(batch, ctx)):
        classes = gluonpar.lenet(X_shard, device_params[i]).argmax(axis=1)
        right[i] += (classes == y_shard.astype("float32")).sum()
gluonpar.allreduce(right)
print(f"on {len(ctx)} devices: {int(right[0].asscalar())} of {len(y_test)} images are right")
expected = metrics.accuracy(X_test, y_test, device_params, ctx, gluonpar.lenet)
assert right[0].asscalar() == round(expected * len(y_test))

# %% batch-norm
layer = gluonpar.SyncBatchNorm(in_channels=1)
layer.initialize(ctx=ctx)
with autograd.record():
    outputs = [layer(shard) for shard in gluonpar.split_and_load(X_train[:8], ctx)]
two = np.concatenate([output.asnumpy() for output in outputs])
print(f"one device and two differ by up to {np.abs(one - two).max():.1e}")
assert np.allclose(one, two, atol=1e-5)

# %% speed
for name, speeds in (("3 to 1", (3, 1)), ("20 to 1", (20, 1))):
    even = 128 / min(speeds)  # the slowest device sets the pace
    sizes = [len(shard) for shard in gluonpar.split_and_load(X_train[:256], ctx, weights=speeds)]
    weighted = max(size / speed for size, speed in zip(sizes, speeds))
    alone_on_fast = 256 / max(speeds)
    print(
        f"{name}: {sizes}, {weighted:.0f}; evenly {even:.0f}; without the slow {alone_on_fast:.0f}"
    )

# %% wait
from collections import deque

in_flight, timer = deque(), d2l.Timer()
for X, y in data.batches(X_train[:1024], y_train[:1024], 256):
    in_flight.append(gluonpar.train_batch(X, y, device_params, ctx, lr))
    if len(in_flight) > 2:  # two steps may be under way
        for waited_for in in_flight.popleft():
            waited_for.wait_to_read()
asked = timer.stop()
timer.start()
mx.nd.waitall()
print(f"the loop took {asked:.3f} s, what was then still under way {timer.stop():.3f} s")
