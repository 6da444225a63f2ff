"""The code cells of the walkthrough, used by the notebooks of both languages.

Each cell begins with ``# %% name``, in the order of en.md, which is the order in which they run.
``tools/build_notebooks.py`` combines text and cells.
"""

# %% imports
import gluonpar  # before MXNet, because it changes MXNet's settings
import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# %% devices
from gluonpar.runtime import threads

devices = [mx.cpu(i) for i in range(4)]
threads.share(devices)
print(*devices, "with", threads.describe(devices))

# %% data
import walkthrough_data

data = walkthrough_data.load(limit=4096)  # None: all 60,000
X_train, y_train, X_test, y_test = data.arrays
print(data.name, X_train.shape, X_train.dtype, y_train.shape)

# %% images
import walkthrough_plots as plots
from d2l import mxnet as d2l

plots.use_style()
titles = d2l.get_fashion_mnist_labels(y_train[:8])
pictures = d2l.show_images(data.pictures[:8], 1, 8, titles=titles, scale=1.2)

# %% split
for n in (8, 7, 2):
    shards = gluonpar.split_and_load(X_train[:n], devices)
    print(f"{n} samples:", {str(shard.context): len(shard) for shard in shards})

# %% params
mx.random.seed(0)
params = gluonpar.init_lenet(scale=0.1)
print(*[param.shape for param in params], sep=", ")


# %% loss
def cross_entropy(scores, labels):
    return -nd.pick(nd.log_softmax(scores), labels)


losses = cross_entropy(gluonpar.lenet(nd.array(X_train[:4]), params), nd.array(y_train[:4]))
print("one loss per image:", losses.asnumpy().round(2))
print(f"random guessing among ten classes: {np.log(10):.2f}")

# %% replicas
ctx = devices[:2]
device_params = [gluonpar.get_params(params, c) for c in ctx]
print("replicas on", *[replica[0].context for replica in device_params])

# %% step-forward
X, y, lr = X_train[:5], y_train[:5], 0.02
shards = gluonpar.split_and_load((X, y), ctx)
with autograd.record():
    losses = [
        cross_entropy(gluonpar.lenet(X_shard, replica), y_shard)
        for (X_shard, y_shard), replica in zip(shards, device_params)
    ]
for loss in losses:
    print(loss.context, loss.asnumpy().round(3))

# %% step-backward
autograd.backward(losses)
parts = [replica[-1].grad.asnumpy() for replica in device_params]
print(*[f"{c}: {part.round(2)}" for c, part in zip(ctx, parts)], sep="\n")

# %% by-hand
import walkthrough_tables as tables


def three_numbers():
    return [nd.full((1,), 10**i, ctx=c) for i, c in enumerate(devices[:3])]


arrays = three_numbers()
tables.values(arrays)
for other in arrays[1:]:
    arrays[0] += other.copyto(arrays[0].context)  # add to device 0
for other in arrays[1:]:
    arrays[0].copyto(other)  # copy the sum back
tables.values(arrays)
assert [int(array.asscalar()) for array in arrays] == [111, 111, 111]

# %% step-allreduce
gluonpar.allreduce_grads(device_params)
sums = [replica[-1].grad.asnumpy() for replica in device_params]
assert np.array_equal(*sums)
print(f"{ctx[0]} and {ctx[1]}: {sums[0].round(2)}")

# %% step-update
for replica in device_params:
    gluonpar.sgd(replica, lr, batch_size=len(X))

for here, there in zip(*device_params):
    assert np.array_equal(here.asnumpy(), there.asnumpy())
moved = np.abs(device_params[0][-1].asnumpy() - params[-1].asnumpy()).max()
print(f"b4 changed by up to {moved:.3f}, equally on both devices")

# %% train
from gluonpar import metrics
from gluonpar.training.data import dataset

NUM_EPOCHS = 4


def train(num_devices, batch_size=256, lr=0.02, num_epochs=NUM_EPOCHS, after_epoch=None):
    ctx = devices[:num_devices]
    device_params = [gluonpar.get_params(params, c) for c in ctx]
    order = np.random.RandomState(0)  # the same batches for any number of devices
    timer, history = d2l.Timer(), []
    for epoch in range(1, num_epochs + 1):
        timer.start()
        batches = dataset.batches(X_train, y_train, batch_size, order)
        losses = [gluonpar.train_batch(X, y, device_params, ctx, lr) for X, y in batches]
        mx.nd.waitall()  # otherwise the time would be that of queueing the work
        timer.stop()
        history += [sum(loss.sum().asscalar() for loss in step) / batch_size for step in losses]
        if after_epoch is not None:
            after_epoch(epoch, np.mean(history[-len(losses) :]))
    accuracy = metrics.accuracy(X_test, y_test, device_params, ctx, gluonpar.lenet)
    return np.array(history), accuracy, timer.avg()


# %% curves
counts = (1, 2, 4)
draw = plots.loss_curves(counts, NUM_EPOCHS)
runs = {count: train(count, after_epoch=draw[count]) for count in counts}

# %% table
tables.runs(runs, {count: sum(map(threads.size, devices[:count])) for count in counts})

# %% np-lenet
from mxnet import npx

npx.set_np()
np_params = [mx.np.array(param.asnumpy()) for param in params]


def lenet_np(X, params):
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    average = {"pool_type": "avg", "kernel": (2, 2), "stride": (2, 2)}
    h1 = npx.relu(npx.convolution(X, W1, b1, kernel=(3, 3), num_filter=20))
    h2 = npx.pooling(h1, **average)
    h2 = npx.relu(npx.convolution(h2, W2, b2, kernel=(5, 5), num_filter=50))
    h3 = npx.pooling(h2, **average).reshape(len(X), -1)
    return mx.np.dot(npx.relu(mx.np.dot(h3, W3) + b3), W4) + b4


# %% np-step
np_device_params = [gluonpar.get_params(np_params, c) for c in ctx]
np_shards = gluonpar.split_and_load((mx.np.array(X), mx.np.array(y)), ctx)
with autograd.record():
    losses = [
        -npx.pick(npx.log_softmax(lenet_np(X_shard, replica)), y_shard)
        for (X_shard, y_shard), replica in zip(np_shards, np_device_params)
    ]
autograd.backward(losses)
gluonpar.allreduce_grads(np_device_params)
for replica in np_device_params:
    gluonpar.sgd(replica, lr, batch_size=len(X))

npx.reset_np()  # the rest of the notebook uses mx.nd
for of_nd, of_np in zip(device_params[1], np_device_params[1]):
    assert np.allclose(of_nd.asnumpy(), of_np.asnumpy(), rtol=1e-5, atol=1e-6)
print(type(np_device_params[1][0]), "with the values of the step in mx.nd")

# %% split-sizes
parameters = sum(param.size for param in params)
between_layers = [20 * 13 * 13, 50 * 4 * 4, 128]  # numbers per sample, from layer to layer
batch_sizes = 2 ** np.arange(11)

by_layers = 2 * between_layers[1] * batch_sizes  # forward and backward, where the network is split
within_layers = 2 * sum(between_layers) * batch_sizes  # every layer, forward and backward
by_samples = 2 * parameters * np.ones_like(batch_sizes)  # gradients and their sums
d2l.plot(
    [batch_sizes] * 3,
    [4e-6 * numbers for numbers in (by_layers, within_layers, by_samples)],
    xlabel="batch size",
    ylabel="megabytes per step",
    legend=["by layers", "within layers", "by samples"],
    xscale="log",
    yscale="log",
    figsize=plots.WIDE,
)

# %% arrays
for name, param in zip(("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"), params):
    print(f"{name}  {param.shape!s:15} {param.size:7} numbers")
print(f"total               {parameters:7} numbers, {4 * parameters / 1e6:.2f} MB")

# %% lenet
W1, b1, W2, b2, W3, b3, W4, b4 = params
images = nd.array(X_train[:4])

h1 = nd.relu(nd.Convolution(images, W1, b1, kernel=(3, 3), num_filter=20))
h1 = nd.Pooling(h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
h2 = nd.relu(nd.Convolution(h1, W2, b2, kernel=(5, 5), num_filter=50))
h2 = nd.Pooling(h2, pool_type="avg", kernel=(2, 2), stride=(2, 2))
h3 = nd.relu(nd.dot(h2.reshape((len(images), -1)), W3) + b3)
scores = nd.dot(h3, W4) + b4

for step in (images, h1, h2, h3, scores):
    print(step.shape)
assert np.allclose(scores.asnumpy(), gluonpar.lenet(images, params).asnumpy(), atol=1e-5)

# %% alias
weight = nd.ones((2,), ctx=devices[0])
maybe = weight.as_in_context(devices[0])
copied = weight.copyto(devices[0])
weight += 1
print("as_in_context:", maybe.asnumpy(), " copyto:", copied.asnumpy())

# %% wrong-order
arrays = three_numbers()
for other in arrays[1:]:
    arrays[0] += other.copyto(arrays[0].context)
    arrays[0].copyto(other)  # too early: cpu(2) has not been added yet
tables.values(arrays)

arrays = three_numbers()
arrays[0] += arrays[1].copyto(devices[0])
arrays[1] += arrays[0].copyto(devices[1])  # adds cpu(1)'s number a second time
tables.values(arrays)

# %% rebinding
parameter = nd.zeros((1,), ctx=devices[0])
parameter.attach_grad()
parameter.grad[:] = 1

total = parameter.grad
total = total + 10  # a new array under the same name
print("after total = total + 10:", parameter.grad.asscalar())

total = parameter.grad
total += 10  # the same array, with a new value
print("after total += 10:       ", parameter.grad.asscalar())

# %% star
from gluonpar import collectives

arrays = three_numbers()
gluonpar.allreduce(arrays, "star")
tables.values(arrays)
print(collectives.trace("star", 3))

# %% rounding
a, b, c = np.float32([1e8, -1e8, 1])
print((a + b) + c, a + (b + c))

# %% even-only
from mxnet import gluon

try:
    gluon.utils.split_and_load(nd.array(X_train[:7]), devices)
except ValueError as error:
    print("Gluon:", str(error).split(".")[0])

# %% mean-of-means
losses_of_five = np.array([1.0, 1.0, 1.0, 4.0, 4.0])
halves = [losses_of_five[:3], losses_of_five[3:]]
print("mean of the batch:   ", losses_of_five.mean())
print("mean of shard means: ", np.mean([part.mean() for part in halves]))
print("sum of shard sums / 5:", sum(part.sum() for part in halves) / 5)

# %% step-picture
alone = gluonpar.get_params(params, devices[0])
with autograd.record():
    loss = cross_entropy(gluonpar.lenet(nd.array(X), alone), nd.array(y))
loss.backward()
whole = alone[-1].grad.asnumpy()
assert np.allclose(sums[0], whole, rtol=1e-5, atol=1e-6)
plots.gradients(ctx, parts, sums[0], whole)

# %% step-alone
gluonpar.sgd(alone, lr, batch_size=len(X))
for here, there, one in zip(*device_params, alone):
    metrics.check_identical([here, there], "a parameter")  # bit for bit
    assert np.allclose(here.asnumpy(), one.asnumpy(), rtol=1e-5, atol=1e-6)
furthest = max(
    np.abs(two.asnumpy() - one.asnumpy()).max() for two, one in zip(device_params[1], alone)
)
print(f"two devices and one differ by at most {furthest:.1e}")

# %% train-batch
again = [gluonpar.get_params(params, c) for c in devices[:3]]
gluonpar.train_batch(X, y, again, devices[:3], lr)
difference = max(
    np.abs(three.asnumpy() - one.asnumpy()).max() for three, one in zip(again[2], alone)
)
print(f"three devices and one differ by at most {difference:.1e}")
assert difference < 1e-6

# %% step-times
import walkthrough_timing as timing

times = timing.measure(timing.settings(threads.cores()))
tables.step_times(times)

# %% what-is-gained
tables.gains(times)


# %% difference
def per_epoch(history):
    return history.reshape(NUM_EPOCHS, -1).mean(axis=1)


one = runs[1][0]
differences = {count: np.abs(runs[count][0] - one) / one for count in (2, 4)}
d2l.plot(
    [np.arange(1, len(one) + 1)] * 2,
    [np.maximum(differences[2], 1e-9), np.maximum(differences[4], 1e-9)],
    xlabel="step",
    ylabel="relative difference",
    legend=["2 devices and 1", "4 devices and 1"],
    yscale="log",
    figsize=plots.WIDE,
)
for count in (2, 4):
    assert differences[count][0] < 1e-6, "the first step may differ only by rounding"
    assert np.allclose(per_epoch(runs[count][0]), per_epoch(one), rtol=0.02)

# %% profile
from gluonpar.training.profiler import Profiler

device_params = [gluonpar.get_params(params, c) for c in ctx]
with Profiler(ctx, warm_up=6, num_steps=8) as profiler:
    for X, y in dataset.batches(X_train, y_train, 256):
        gluonpar.train_batch(X, y, device_params, ctx, lr)
        profiler.step()
print(profiler.table())

# %% ring
hops = collectives.algorithms.ring.plan(4)
print(len(hops), "hops; the first:", hops[0])
plots.plan("ring", 4)

# %% ring-states
from gluonpar.plans.plan import contributions, num_chunks, num_steps

for chunk, counts in enumerate(contributions(hops, 4)[0]):
    print(f"on device 0, chunk {chunk} has the values of devices 0 to 3 this often: {counts}")
collectives.check(hops, 4)  # the same for all devices; an error would say what is wrong

# %% ring-run
values = np.arange(4 * 10).reshape(4, 10).astype("float32")  # 10 numbers in 4 uneven chunks
arrays = [nd.array(value, ctx=c) for value, c in zip(values, devices)]
gluonpar.allreduce(arrays, "ring")
for array in arrays:
    print(array.context, array.asnumpy().astype(int))
    assert np.array_equal(array.asnumpy(), values.sum(axis=0))

# %% check-plan
import walkthrough_checks as checks

checks.ring(collectives.ALGORITHMS["tree"])

# %% exercise-ring
from gluonpar.collectives import Hop


def my_ring(num_devices):
    """So far the star: all arrays to device 0, in one chunk, and back."""
    others = range(1, num_devices)
    collect = [Hop(i - 1, i, 0, 0, reduce=True) for i in others]
    return collect + [Hop(num_devices - 2 + i, 0, i, 0, reduce=False) for i in others]


checks.ring(my_ring)

# %% my-ring
collectives.ALGORITHMS.pop("my-ring", None)  # so that this cell can be run again
collectives.register("my-ring")(my_ring)


def milliseconds(algorithm, num_bytes, repeats=15):
    """The times of an all-reduce on the four devices; every sum is checked."""
    times = []
    for _ in range(2 + repeats):  # the first two warm up
        arrays = [nd.full((num_bytes // 4,), 10**i, ctx=c) for i, c in enumerate(devices)]
        mx.nd.waitall()
        timer = d2l.Timer()
        gluonpar.allreduce(arrays, algorithm)
        mx.nd.waitall()
        times.append(timer.stop())
        assert all((array.asnumpy() == 1111).all() for array in arrays), "a sum is wrong"
    return 1e3 * np.array(times[2:])


for name in ("my-ring", "ring"):
    print(f"{name:8} {np.median(milliseconds(name, 1 << 20)):7.2f} ms for arrays of 1 MiB")
plots.plan("my-ring", 4)


# %% cost-model
def predicted(algorithm, num_devices, num_bytes, latency, bandwidth):
    hops = collectives.ALGORITHMS[algorithm](num_devices)
    chunk_bytes = num_bytes / num_chunks(hops)
    return num_steps(hops) * (latency + chunk_bytes / bandwidth)


algorithms = ("star", "tree", "ring")
sizes = 4.0 ** np.arange(5, 15)
model = [[predicted(name, 8, n, 10e-6, 10e9) for n in sizes] for name in algorithms]
d2l.plot(
    [sizes] * 3,
    [1e3 * np.array(seconds) for seconds in model],
    xlabel="bytes",
    ylabel="milliseconds",
    legend=[f"{name}, 8 devices" for name in algorithms],
    xscale="log",
    yscale="log",
    figsize=plots.WIDE,
)

# %% measure
names, array_bytes = (*algorithms, "host"), (1 << 12, 1 << 18, 1 << 24)
measured = {name: [milliseconds(name, n) for n in array_bytes] for name in names}
tables.bandwidths(measured, array_bytes, num_devices=4)

# %% measured-picture
on_links = {
    name: [1e3 * predicted(name, 4, n, 10e-6, 10e9) for n in array_bytes] for name in algorithms
}
medians = {name: np.median(times, axis=1) for name, times in measured.items()}
plots.links_and_memory(on_links, medians, array_bytes)

# %% resnet
from gluonpar.models import resnet

mx.random.seed(0)
net = resnet.resnet18(num_classes=10, width=8)  # the book's is 64 wide
net.initialize(mx.init.Xavier(), ctx=ctx)
net.hybridize(static_alloc=True, static_shape=True)
loss = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
sizes_of = [param.data(ctx[0]).size for param in net.collect_params().values()]
print(f"{sum(sizes_of)} numbers in {len(sizes_of)} parameters, on each of {ctx}")

# %% resnet-train
animator = d2l.Animator(xlabel="epoch", ylabel="training loss", xlim=[1, 3], figsize=plots.WIDE)
timer, order = d2l.Timer(), np.random.RandomState(0)
for epoch in range(1, 4):
    timer.start()
    meter = metrics.LossMeter()
    for X, y in dataset.batches(X_train[:1024], y_train[:1024], 64, order):
        shards = gluonpar.split_and_load((X, y), ctx)
        with autograd.record():
            losses = [loss(net(X_shard), y_shard) for X_shard, y_shard in shards]
        autograd.backward(losses)
        trainer.step(len(X))
        meter.add(losses)
    animator.add(epoch, meter.read())
    timer.stop()
trainer.check_replicas()  # raises an error unless bit for bit the same on both devices
gluonpar.average_statistics(net)
accuracy = metrics.accuracy(X_test, y_test, [net, net], ctx, lambda X, net: net(X))
print(f"test accuracy {accuracy:.2f}, {1024 / timer.avg():.0f} images/sec on {ctx}")

# %% stock-trainer
stock = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="gluonpar")
with autograd.record():
    losses = [loss(net(X_shard), y_shard) for X_shard, y_shard in shards]
autograd.backward(losses)
stock.step(len(X))
weights = net[0].weight.list_data()
metrics.check_identical(weights, net[0].weight.name)
print(f"the copies on {weights[0].context} and {weights[1].context} are bit for bit the same")

# %% own-loop
mx.random.seed(1)
true_w = nd.array([[2.0], [-3.4]])
features = nd.random.normal(shape=(1024, 2))
targets = nd.dot(features, true_w) + 4.2

replicas = [(nd.zeros((2, 1), ctx=c), nd.zeros((1,), ctx=c)) for c in ctx]
for w, b in replicas:
    w.attach_grad()
    b.attach_grad()

for start in range(0, 1024, 32):
    batch = features[start : start + 32], targets[start : start + 32]
    with autograd.record():
        losses = []
        for i, (c, (w, b)) in enumerate(zip(ctx, replicas)):
            f, t = (part[16 * i : 16 * i + 16].as_in_context(c) for part in batch)
            losses.append((nd.dot(f, w) + b - t) ** 2 / 2)
    autograd.backward(losses)
    gluonpar.allreduce_grads(replicas)
    for replica in replicas:
        for param in replica:
            param -= 0.3 * param.grad / 32

w, b = replicas[1]
print(f"w = {w.asnumpy().ravel().round(2)}, b = {b.asscalar():.2f}")
assert np.allclose(w.asnumpy(), true_w.asnumpy(), atol=0.01)


# %% network
def speedup(num_machines, bandwidth, compute=0.7, num_bytes=44e6, latency=50e-6):
    exchange = predicted("ring", num_machines, num_bytes, latency, bandwidth)
    return num_machines * compute / (compute + exchange)


machines = np.array([1, 2, 4, 8, 16])
bandwidths = {"1 Gbit/s": 0.125e9, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}
d2l.plot(
    [machines] * 3,
    [[speedup(int(count), bandwidth) for count in machines] for bandwidth in bandwidths.values()],
    xlabel="machines",
    ylabel="speedup",
    legend=list(bandwidths),
    figsize=plots.WIDE,
)

# %% processes
from walkthrough_processes import run

PROGRAM = """
import sys
from gluonpar import cluster, train

count = int(sys.argv[1])
history = train(count, dataset="synthetic", device="cpu", limit=512, num_epochs=2, verbose=False)
if cluster.is_main():
    loss = history.epochs[-1].loss
    print(f"processes: {cluster.size()}, devices in each: {count}, loss {loss:.4f}")
"""

run(PROGRAM, num_processes=1, num_devices=2)
run(PROGRAM, num_processes=2, num_devices=1)

# %% exercise-batch-size
for count, batch_size in ((1, 256), (2, 512), (4, 1024)):
    history, accuracy, seconds = train(count, batch_size, num_epochs=2)
    last = history[len(history) // 2 :].mean()  # the second epoch
    print(f"devices {count}, batches of {batch_size}: {len(history)} steps, loss {last:.3f}")

# %% exercise-learning-rate
for rate in (0.01, 0.02, 0.04):
    history, accuracy, seconds = train(1, lr=rate, num_epochs=1)
    print(f"1 device, lr {rate}: loss {history[-8:].mean():.4f}")


# %% exercise-owners
def owners(num_devices):
    """So far the star: all arrays to device 0, in one chunk, and back."""
    others = range(1, num_devices)
    collect = [Hop(i - 1, i, 0, 0, reduce=True) for i in others]
    return collect + [Hop(num_devices - 2 + i, 0, i, 0, reduce=False) for i in others]


print(collectives.Trace("owners", 4, owners(4)))
checks.owners(owners)


# %% exercise-accuracy
def count_correct(batches, device_params, ctx, model):
    """So far device 0 computes everything, and every batch is waited for."""
    correct = 0
    for X, y in batches:
        classes = model(nd.array(X, ctx=ctx[0]), device_params[0]).argmax(axis=1)
        correct += int((classes.asnumpy() == y).sum())
    return correct


batches = dataset.batches(X_test, y_test, 256)
correct = count_correct(batches, device_params, ctx, gluonpar.lenet)
print(f"{int(correct)} of {len(y_test)} images are correct")
checks.accuracy(count_correct)


# %% exercise-batch-norm
def normalize(X, ctx):
    """So far each device normalises its shard alone. Returns one output per device."""
    layer = gluon.nn.BatchNorm(in_channels=1)
    layer.initialize(ctx=ctx)
    with autograd.record():
        return [layer(shard) for shard in gluonpar.split_and_load(X, ctx)]


checks.batch_norm(normalize)


# %% exercise-speed
def split(X, speeds, ctx):
    """So far all shards have the same size, whatever the speeds are."""
    return gluonpar.split_and_load(X, ctx)


print([len(shard) for shard in split(X_train[:256], (3, 1), ctx)])
checks.speeds(split)


# %% exercise-wait
def run_steps(batches, step):
    """So far all steps are queued at once. step(X, y) queues one and returns its losses."""
    for X, y in batches:
        step(X, y)


def step(X, y):
    return gluonpar.train_batch(X, y, device_params, ctx, lr)


timer = d2l.Timer()
run_steps(dataset.batches(X_train[:1024], y_train[:1024], 256), step)
print(f"queued four steps in {timer.stop():.3f} s")
timer.start()
mx.nd.waitall()
print(f"waited for them   {timer.stop():.3f} s")
checks.in_progress(run_steps)
