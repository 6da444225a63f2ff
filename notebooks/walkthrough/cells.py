"""The code cells of the walkthrough, used by the notebooks of both languages.

Each cell begins with ``# %% name``, in the order of en.md, which is the order in which they run.
``tools/build_notebooks.py`` combines text and cells.
"""

# %% imports
import gluonpar  # before MXNet, because it changes MXNet's settings
import mxnet as mx
import numpy as np
import walkthrough_plots as plots
from d2l import mxnet as d2l
from gluonpar import collectives, metrics
from gluonpar.models import lenet
from gluonpar.runtime import threads
from gluonpar.training.data import dataset
from mxnet import autograd, gluon, nd

plots.use_style()


# %% devices
devices = [mx.cpu(i) for i in range(4)]
threads.share(devices)
print(*devices, "with", threads.describe(devices))


# %% data
try:
    data = dataset.load("fashion-mnist", limit=4096)  # limit=None: all 60,000
except FileNotFoundError:
    data = dataset.load("synthetic", limit=4096)
    print("Fashion-MNIST was not found here: all images below are synthetic, with ten patterns.")


def standardize(images):
    return lenet.standardize(nd.array(images)).asnumpy()


X_train, y_train = standardize(data.train_images), data.train_labels
X_test, y_test = standardize(data.test_images[:1000]), data.test_labels[:1000]
print(data.name, X_train.shape, X_train.dtype, y_train.shape)

# %% images
titles = d2l.get_fashion_mnist_labels(y_train[:8])
pictures = d2l.show_images(data.train_images[:8, 0], 1, 8, titles=titles, scale=1.2)

# %% split-sizes
parameters = sum(np.prod(shape) for shape in lenet.LENET_SHAPES)
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

# %% params
mx.random.seed(0)
params = gluonpar.init_lenet(scale=0.1)
for name, param in zip(("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4"), params):
    print(f"{name}  {param.shape!s:15} {param.size:7} numbers")
print(f"total               {parameters:7} numbers, {4 * parameters / 1e6:.2f} MB")

# %% lenet
W1, b1, W2, b2, W3, b3, W4, b4 = params
X, y = nd.array(X_train[:4]), nd.array(y_train[:4])

h1 = nd.relu(nd.Convolution(X, W1, b1, kernel=(3, 3), num_filter=20))
h1 = nd.Pooling(h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
h2 = nd.relu(nd.Convolution(h1, W2, b2, kernel=(5, 5), num_filter=50))
h2 = nd.Pooling(h2, pool_type="avg", kernel=(2, 2), stride=(2, 2))
h3 = nd.relu(nd.dot(h2.reshape((len(X), -1)), W3) + b3)
scores = nd.dot(h3, W4) + b4

for step in (X, h1, h2, h3, scores):
    print(step.shape)
assert np.allclose(scores.asnumpy(), gluonpar.lenet(X, params).asnumpy(), atol=1e-5)


# %% loss
def cross_entropy(scores, labels):
    return -nd.pick(nd.log_softmax(scores), labels)


print("one loss per sample:", cross_entropy(scores, y).asnumpy().round(2))
print(f"random guessing among ten classes: {np.log(10):.2f}")

# %% alias
weight = nd.ones((2,), ctx=devices[0])
maybe = weight.as_in_context(devices[0])
copied = weight.copyto(devices[0])
weight += 1
print("as_in_context:", maybe.asnumpy(), " copyto:", copied.asnumpy())

# %% replicas
ctx = devices[:2]
device_params = [gluonpar.get_params(params, c) for c in ctx]
for replica in device_params:
    print(replica[1].context, "b1 =", replica[1][:3].asnumpy(), "gradient", replica[1].grad.shape)


# %% by-hand
def three_numbers():
    return [nd.full((1,), 10**i, ctx=c) for i, c in enumerate(devices[:3])]


def show(arrays):
    print({str(array.context): int(array.asscalar()) for array in arrays})


arrays = three_numbers()
show(arrays)
for other in arrays[1:]:
    arrays[0] += other.copyto(arrays[0].context)  # add to device 0
for other in arrays[1:]:
    arrays[0].copyto(other)  # copy the sum back
show(arrays)
assert [int(array.asscalar()) for array in arrays] == [111, 111, 111]

# %% wrong-order
arrays = three_numbers()
for other in arrays[1:]:
    arrays[0] += other.copyto(arrays[0].context)
    arrays[0].copyto(other)  # too early: cpu(2) has not been added yet
show(arrays)

arrays = three_numbers()
arrays[0] += arrays[1].copyto(devices[0])
arrays[1] += arrays[0].copyto(devices[1])  # adds cpu(1)'s number a second time
show(arrays)

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
arrays = three_numbers()
gluonpar.allreduce(arrays, "star")
show(arrays)
print(collectives.trace("star", 3))

# %% rounding
a, b, c = np.float32([1e8, -1e8, 1])
print((a + b) + c, a + (b + c))

# %% split
for n in (8, 7, 2):
    shards = gluonpar.split_and_load(X_train[:n], devices)
    print(f"{n} samples:", {str(shard.context): len(shard) for shard in shards})

# %% even-only
try:
    gluon.utils.split_and_load(nd.array(X_train[:7]), devices)
except ValueError as error:
    print("Gluon:", str(error).split(".")[0])

# %% mean-of-means
losses_of_five = np.array([1.0, 1.0, 1.0, 4.0, 4.0])
parts = [losses_of_five[:3], losses_of_five[3:]]
print("mean of the batch:   ", losses_of_five.mean())
print("mean of shard means: ", np.mean([part.mean() for part in parts]))
print("sum of shard sums / 5:", sum(part.sum() for part in parts) / 5)

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

# %% step-allreduce
for copies in zip(*device_params):
    gluonpar.allreduce([param.grad for param in copies])
sums = [replica[-1].grad.asnumpy() for replica in device_params]
assert np.array_equal(*sums)
print(f"{ctx[0]} and {ctx[1]}: {sums[0].round(2)}")

# %% step-picture
alone = gluonpar.get_params(params, devices[0])
with autograd.record():
    loss = cross_entropy(gluonpar.lenet(nd.array(X), alone), nd.array(y))
loss.backward()
whole = alone[-1].grad.asnumpy()
assert np.allclose(sums[0], whole, rtol=1e-5, atol=1e-6)
plots.gradients(ctx, parts, sums[0], whole)


# %% step-update
for replica in device_params:
    gluonpar.sgd(replica, lr, batch_size=len(X))
gluonpar.sgd(alone, lr, batch_size=len(X))

for here, there, one in zip(*device_params, alone):
    metrics.check_identical([here, there], "a parameter")  # bit for bit
    assert np.allclose(here.asnumpy(), one.asnumpy(), rtol=1e-5, atol=1e-6)
moved = np.abs(alone[-1].asnumpy() - params[-1].asnumpy()).max()
print(f"b4 changed by up to {moved:.3f}, equally on two devices and on one")

# %% train-batch
again = [gluonpar.get_params(params, c) for c in devices[:3]]
gluonpar.train_batch(X, y, again, devices[:3], lr)
difference = max(
    np.abs(three.asnumpy() - one.asnumpy()).max() for three, one in zip(again[2], alone)
)
print(f"three devices and one differ by at most {difference:.1e}")
assert difference < 1e-6

# %% train
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
animator = d2l.Animator(
    xlabel="epoch",
    ylabel="training loss",
    legend=[f"{count} device{'s' * (count > 1)}" for count in counts],
    xlim=[1, NUM_EPOCHS],
    fmts=("C0-", "C1--", "C3:"),
    figsize=plots.WIDE,
)
runs = {}
for i, count in enumerate(counts):

    def draw(epoch, loss, i=i):
        animator.add(epoch, [loss if j == i else None for j in range(len(counts))])

    runs[count] = train(count, after_epoch=draw)

# %% table
print("devices  threads  loss of the last epoch  test accuracy  sec/epoch")
for count, (history, accuracy, seconds) in runs.items():
    num_threads = sum(threads.size(c) for c in devices[:count])
    last = history[-16:].mean()  # an epoch is 16 steps
    print(f"{count:7}  {num_threads:7}  {last:22.4f}  {accuracy:13.3f}  {seconds:9.2f}")

# %% step-times
import walkthrough_timing as timing

cores = threads.cores()
one_half = f"1 device, {max(1, cores // 2)} of {cores} cores"
one_all = f"1 device, all {cores} cores"
both, separate = "2 devices sharing the cores", "2 devices, no exchange"
half_the_threads = {"OMP_NUM_THREADS": str(max(1, cores // 2))}
mxnets = {"MXNET_CPU_TEMP_COPY": "4", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}
mxnets["MXNET_OMP_MAX_THREADS"] = half_the_threads["OMP_NUM_THREADS"]
times = timing.measure(
    {
        one_half: (1, "together", half_the_threads),
        one_all: (1, "together", {}),
        both: (2, "together", {}),
        separate: (2, "alone", {}),
        "1 device, MXNet's defaults": (1, "together", mxnets),
        "2 devices, MXNet's defaults": (2, "together", mxnets),
    }
)
print(f"{'ms per step':46}     LeNet  perceptron")
for name, ms in times.items():
    print(f"{name:46} {ms['LeNet']:9.1f} {ms['perceptron']:11.1f}")

# %% what-is-gained
comparisons = {
    "all cores instead of half, one device": (one_half, one_all),
    "two devices instead of one, all cores": (one_all, both),
    "without the exchange, two devices": (both, separate),
    "gluonpar's settings, one device": ("1 device, MXNet's defaults", one_all),
    "gluonpar's settings, two devices": ("2 devices, MXNet's defaults", both),
}
print(f"{'times as fast':46}     LeNet  perceptron")
for change, (before, after) in comparisons.items():
    gains = [times[before][network] / times[after][network] for network in ("LeNet", "perceptron")]
    print(f"{change:46} {gains[0]:9.2f} {gains[1]:11.2f}")

for network in ("LeNet", "perceptron"):
    half, one, two = (times[setting][network] for setting in (one_half, one_all, both))
    verdict = "about as fast as"
    if not 0.95 < one / two < 1.05:
        verdict = "faster than" if two < one else "slower than"
    print(f"{network}: from one device with half of the cores to two devices with all of them:")
    print(f"    {half / two:.2f} = {half / one:.2f} (cores) x {one / two:.2f} (second device);")
    print(f"    two devices are {verdict} one device with the same cores")


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
    for X, y in profiler.loading(dataset.batches(X_train, y_train, 256)):
        gluonpar.train_batch(X, y, device_params, ctx, lr)
        profiler.step()
print(profiler.table())
print(*profiler.sentence().split(", "), sep="\n  ")


# %% timeline
plots.timeline(profiler.timeline)


# %% ring
hops = collectives.algorithms.ring.plan(4)
print(len(hops), "hops; the first:", hops[0])
collectives.trace("ring", 4).draw()

# %% ring-states
from gluonpar.plans.plan import contributions, num_steps

print("device 0 ends with", *map(dict, contributions(hops, 4)[0]))
all_once = {0: 1, 1: 1, 2: 1, 3: 1}  # the number of every device, once
assert all(chunk == all_once for device in contributions(hops, 4) for chunk in device)


# %% ring-run
values = np.arange(4 * 10).reshape(4, 10).astype("float32")  # 10 numbers in 4 uneven chunks
arrays = [nd.array(value, ctx=c) for value, c in zip(values, devices)]
gluonpar.allreduce(arrays, "ring")
for array in arrays:
    print(array.context, array.asnumpy().astype(int))
    assert np.array_equal(array.asnumpy(), values.sum(axis=0))

# %% check-plan
from gluonpar.plans.plan import chunks_sent, num_chunks


def check(plan):
    is_the_ring = True
    for k in (2, 3, 4, 7):
        hops = plan(k)
        values = np.random.randint(100, size=(k, num_chunks(hops)))
        expected = values.sum(axis=0)
        for step in range(num_steps(hops)):
            now = [hop for hop in hops if hop.step == step]
            sent = [values[hop.src, hop.chunk] for hop in now]  # before anything arrives
            for hop, value in zip(now, sent):
                values[hop.dst, hop.chunk] = value + hop.reduce * values[hop.dst, hop.chunk]
        right = bool((values == expected).all())
        most = max(chunks_sent(hops).values(), default=0)
        to_next = all(hop.dst == (hop.src + 1) % k for hop in hops)
        is_the_ring &= right and to_next and num_chunks(hops) == k and most <= 2 * (k - 1)
        print(f"K = {k}: sums {'right' if right else 'WRONG'}, chunks {num_chunks(hops)},", end=" ")
        print(f"at most {most} sent by one device, {'only' if to_next else 'NOT only'} to the next")
    print("This is the ring." if is_the_ring else "This is not the ring yet.")


check(collectives.named("tree").plan)

# %% exercise-ring
from gluonpar.collectives import Hop


def my_ring(num_devices):
    """So far the star: all arrays to device 0, in one chunk, and back."""
    others = range(1, num_devices)
    collect = [Hop(i - 1, i, 0, 0, reduce=True) for i in others]
    return collect + [Hop(num_devices - 2 + i, 0, i, 0, reduce=False) for i in others]


check(my_ring)

# %% my-ring
collectives.ALGORITHMS.pop("my-ring", None)  # so that this cell can be run again
collectives.register("my-ring")(my_ring)


def milliseconds(algorithm, num_bytes, repeats=7):
    """The median time of an all-reduce on the four devices; every sum is checked."""
    times = []
    for _ in range(2 + repeats):  # the first two warm up
        arrays = [nd.full((num_bytes // 4,), 10**i, ctx=c) for i, c in enumerate(devices)]
        mx.nd.waitall()
        timer = d2l.Timer()
        gluonpar.allreduce(arrays, algorithm)
        mx.nd.waitall()
        times.append(timer.stop())
        assert all((array.asnumpy() == 1111).all() for array in arrays), "a sum is wrong"
    return 1e3 * np.median(times[2:])


for name in ("my-ring", "ring"):
    print(f"{name:8} {milliseconds(name, 1 << 20):7.2f} ms for arrays of 1 MiB")
collectives.trace("my-ring", 4).draw()


# %% cost-model
def predicted(algorithm, num_devices, num_bytes, latency, bandwidth):
    hops = collectives.named(algorithm).plan(num_devices)
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
measured = {name: [] for name in names}  # busbw
print("   bytes  algorithm        ms  algbw GB/s  busbw GB/s")
for n in array_bytes:
    for name in names:
        ms = milliseconds(name, n)
        algbw = n / ms / 1e6
        measured[name].append(algbw * 2 * (4 - 1) / 4)
        print(f"{n:8}  {name:9} {ms:9.2f} {algbw:11.3f} {measured[name][-1]:11.3f}")


# %% measured-picture
plots.busbw(measured, array_bytes)


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
    for copies in zip(*replicas):
        gluonpar.allreduce([param.grad for param in copies])
        for param in copies:
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
import os
import pathlib
import subprocess
import sys

PROGRAM = """
from gluonpar import cluster, train

history = train({0}, dataset="synthetic", device="cpu", limit=512, num_epochs=2, verbose=False)
if cluster.is_main():
    loss = history.epochs[-1].loss
    print(f"processes: {{cluster.size()}}, devices in each: {0}, loss {{loss:.4f}}")
"""


def run(num_processes, num_devices):
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [sys.executable, "-c", PROGRAM.format(num_devices)]
    if num_processes > 1:
        command = [str(mpirun), "--oversubscribe", "-n", str(num_processes), *command]
    done = subprocess.run(command, env={**os.environ, **as_root}, capture_output=True, text=True)
    print(done.stdout or done.stderr, end="")


run(1, 2)
run(2, 1)

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
collectives.ALGORITHMS.pop("owners", None)  # so that this cell can be run again


@collectives.register("owners")
def owners(num_devices):
    """So far the star: all arrays to device 0, in one chunk, and back."""
    others = range(1, num_devices)
    collect = [Hop(i - 1, i, 0, 0, reduce=True) for i in others]
    return collect + [Hop(num_devices - 2 + i, 0, i, 0, reduce=False) for i in others]


print(collectives.trace("owners", 4))
assert all(chunk == all_once for device in contributions(owners(4), 4) for chunk in device)

# %% exercise-accuracy
correct = 0
for X, y in dataset.batches(X_test, y_test, 256):
    classes = gluonpar.lenet(nd.array(X, ctx=ctx[0]), device_params[0]).argmax(axis=1)
    correct += int((classes.asnumpy() == y).sum())
print(f"on device 0 alone: {correct} of {len(y_test)} images are correct")

# %% exercise-batch-norm
X = X_train[:8]
layer = gluon.nn.BatchNorm(in_channels=1)
layer.initialize(ctx=ctx)
with autograd.record():
    one = layer(nd.array(X, ctx=ctx[0])).asnumpy()
    two = [layer(shard) for shard in gluonpar.split_and_load(X, ctx)]
two = np.concatenate([output.asnumpy() for output in two])
print(f"one device and two differ by up to {np.abs(one - two).max():.3f}")

# %% exercise-speed
weights = [3, 1]  # device 0 is three times as fast as device 1
shards = gluonpar.split_and_load(X_train[:256], ctx, weights=weights)
print([len(shard) for shard in shards])

# %% exercise-wait
timer = d2l.Timer()
for X, y in dataset.batches(X_train[:1024], y_train[:1024], 256):
    gluonpar.train_batch(X, y, device_params, ctx, lr)
print(f"queued four steps in {timer.stop():.3f} s")
timer.start()
mx.nd.waitall()
print(f"waited for them   {timer.stop():.3f} s")
