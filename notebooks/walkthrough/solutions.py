"""The solutions of the exercises, shown collapsed, with their output.

``tools/build_notebooks.py`` runs each of them after the cell of its exercise.
"""

# ruff: noqa: F821 - they use names that the notebook's cells define


# %% ring
def my_ring(num_devices):
    k, hops = num_devices, []
    for step in range(2 * (k - 1)):
        for device in range(k):
            chunk = (device - step) % k
            to = (device + 1) % k
            hops.append(Hop(step, device, to, chunk, reduce=step < k - 1))
    return hops


checks.ring(my_ring)

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
def owners(num_devices):
    """Chunk c is summed on device c, its owner, which then sends the sum to all others."""
    others, devices_of = range(1, num_devices), range(num_devices)
    reduce_scatter = [
        Hop(s - 1, i, (i + s) % num_devices, (i + s) % num_devices, reduce=True)
        for s in others
        for i in devices_of
    ]
    all_gather = [
        Hop(num_devices + s - 2, i, (i + s) % num_devices, i, reduce=False)
        for s in others
        for i in devices_of
    ]
    return reduce_scatter + all_gather


print(collectives.Trace("owners", 4, owners(4)))
checks.owners(owners)


# %% accuracy
def count_correct(batches, device_params, ctx, model):
    correct = [nd.zeros((1,), ctx=c) for c in ctx]
    for batch in batches:
        for i, (X_shard, y_shard) in enumerate(gluonpar.split_and_load(batch, ctx)):
            classes = model(X_shard, device_params[i]).argmax(axis=1)
            correct[i] += (classes == y_shard.astype("float32")).sum()
    gluonpar.allreduce(correct)
    return correct[0].asscalar()


batches = dataset.batches(X_test, y_test, 256)
correct = count_correct(batches, device_params, ctx, gluonpar.lenet)
print(f"{int(correct)} of {len(y_test)} images are correct")
checks.accuracy(count_correct)
expected = metrics.accuracy(X_test, y_test, device_params, ctx, gluonpar.lenet)
assert correct == round(expected * len(y_test))


# %% batch-norm
def normalize(X, ctx):
    layer = gluonpar.SyncBatchNorm(in_channels=1)
    layer.initialize(ctx=ctx)

    def forward(shard):
        with autograd.record():
            return layer(shard)

    return gluonpar.run_tasks(forward, gluonpar.split_and_load(X, ctx), ctx)


checks.batch_norm(normalize)


# %% speed
def split(X, speeds, ctx):
    return gluonpar.split_and_load(X, ctx, weights=speeds)


for name, speeds in (("3 to 1", (3, 1)), ("20 to 1", (20, 1))):
    even = 128 / min(speeds)  # the slowest device sets the pace
    sizes = [len(shard) for shard in split(X_train[:256], speeds, ctx)]
    weighted = max(size / speed for size, speed in zip(sizes, speeds))
    fast_only = 256 / max(speeds)
    print(
        f"{name}: {sizes}, {weighted:.0f}; even shards {even:.0f}; fast device only {fast_only:.0f}"
    )
checks.speeds(split)

# %% wait
from collections import deque


def run_steps(batches, step):
    in_flight = deque()
    for X, y in batches:
        if len(in_flight) == 2:  # wait for the older one before a third is queued
            for loss in in_flight.popleft():
                loss.wait_to_read()
        in_flight.append(step(X, y))


timer = d2l.Timer()
run_steps(dataset.batches(X_train[:1024], y_train[:1024], 256), step)
queued = timer.stop()
timer.start()
mx.nd.waitall()
print(f"the loop took {queued:.3f} s, the remaining work {timer.stop():.3f} s")
checks.in_progress(run_steps)
