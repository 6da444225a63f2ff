"""What each rank of a job does with the others: sums, data, losses, statistics, random numbers.

Each function checks one of them, on all ranks at once.
"""

import concurrent.futures
import contextlib
import itertools
import pathlib

import numpy as np
import pytest

import gluonpar
from gluonpar import cluster
from gluonpar.batch_norm import running_statistics
from gluonpar.metrics import LossMeter
from gluonpar.plans import partition

import mxnet as mx  # isort: skip
from mxnet import autograd, gluon  # isort: skip
from tests.support import checkpoint_files  # isort: skip
from tests.support.contexts import contexts, device  # isort: skip

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")


def collective():
    """Check each collective, on arrays that differ in every cell, against NumPy on all of them."""
    rank, size = cluster.rank(), cluster.size()
    for k, dtype in itertools.product((1, 2), DTYPES):
        n = k * size
        # Small integers whose sums are exact in float16, and wrap around in int8 and uint8.
        values = (np.arange(n * 111).reshape(n, 111) * 37 % 250).astype(dtype)
        own = values[rank * k : (rank + 1) * k]
        parts = partition.slices(111, n)

        def after(function, *args, data=own, first=rank * k, **kwargs):
            arrays = [mx.nd.array(x, device(i), x.dtype) for i, x in enumerate(data)]
            with autograd.record():
                function(arrays, *args, **kwargs)
            return [(first + i, array.asnumpy().tolist()) for i, array in enumerate(arrays)]

        ops = {"sum": np.add, "max": np.maximum, "min": np.minimum}
        for op, combine in ops.items():
            want = combine.reduce(values, dtype=dtype)
            options = {"op": op, "algorithm": ["ring", None][k - 1]}
            for _, got in after(gluonpar.allreduce, **options):
                assert got == want.tolist(), (dtype, op)
            for i, got in after(gluonpar.reduce, n - 1, op):
                assert got == (want if i == n - 1 else values[i]).tolist(), (dtype, op, i)
            for i, got in after(gluonpar.reduce_scatter, op):
                expected = values[i].copy()
                expected[parts[i]] = want[parts[i]]
                assert got == expected.tolist(), (dtype, op, i)
        with mx.util.np_shape(True):
            numbers = [mx.np.array(x, dtype, device(i)) for i, x in enumerate(own[:, 0])]
            gluonpar.reduce(numbers, n - 1)
            gluonpar.reduce([mx.np.empty((0, 3), dtype=dtype, ctx=device(i)) for i in range(k)])
        want = np.add.reduce(values[:, 0], dtype=dtype) if rank == size - 1 else own[-1, 0]
        assert numbers[-1].asnumpy() == want
        for _, got in after(gluonpar.broadcast, n - 1):
            assert got == values[n - 1].tolist(), dtype
        gathered = np.concatenate([values[i][part] for i, part in enumerate(parts)])
        for _, got in after(gluonpar.all_gather):
            assert got == gathered.tolist(), dtype
        for _, got in after(lambda data: gluonpar.allreduce_many([data, [x + 1 for x in data]])):
            assert got == np.add.reduce(values, dtype=dtype).tolist(), dtype
        if dtype == "float32":
            towers = [[mx.nd.array(x, device(i))] for i, x in enumerate(own)]
            (mean,) = gluonpar.average_gradients(towers)
            np.testing.assert_allclose(mean.asnumpy(), values.mean(axis=0), rtol=1e-6)
        arrays = [mx.nd.array(x, device(i), dtype) for i, x in enumerate(own)]
        with cluster.local():
            gluonpar.allreduce(arrays, op="max")
        gluonpar.allreduce(arrays, op="max")  # the same arrays again, now of all ranks
        assert arrays[-1].asnumpy().tolist() == values.max(axis=0).tolist(), dtype
        with cluster.local():
            total = np.add.reduce(own, dtype=dtype)
            for _, got in after(gluonpar.allreduce):
                assert got == total.tolist(), dtype
            for i, got in after(gluonpar.reduce_scatter, first=0):
                expected, part = own[i].copy(), partition.slices(111, k)[i]
                expected[part] = total[part]
                assert got == expected.tolist(), (dtype, i)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                assert not pool.submit(cluster.is_local).result()  # another thread is not inside
    # Ranks may have different numbers of arrays; sums may not be representable, where means are.
    for op, numbers in (("sum", range(1, size + 1)), ("mean", range(2, size + 2))):
        data = [mx.nd.full((3,), i + 2.0, device(i)) for i in range(numbers[rank])]
        gluonpar.allreduce(data, op=op)
        every = [i + 2.0 for number in numbers for i in range(number)]
        want = np.float32(sum(every) / (len(every) if op == "mean" else 1))
        assert all((array.asnumpy() == want).all() for array in data), op
    variables, ctx = [mx.nd.full((1,), rank + 5.0)], contexts(rank + 1)
    towers = gluonpar.Towers(lambda batch, params: batch - params[0], variables, ctx)
    assert [own[0].asscalar() for own in towers.variables] == [5] * (rank + 1)  # rank 0's
    for dtype, large in (("float16", 60000), ("float32", 3e38)):
        with mx.util.np_shape(True):
            without_dimensions = mx.np.array(large, dtype=dtype, ctx=device(0))
        for array in (mx.nd.full((2,), large, device(0), dtype), without_dimensions):
            gluonpar.allreduce([array], op="mean")
            assert (array.asnumpy() == np.dtype(dtype).type(large)).all()


def rows():
    """Check sums and means of row_sparse arrays, of which ranks have other rows, some none."""
    rank, size = cluster.rank(), cluster.size()
    for k, dtype in itertools.product((1, 2), ("float16", "float32", "float64")):
        rng = np.random.RandomState(k)
        values = rng.randint(1, 50, (k * size, 9, 2, 3)) * (rng.rand(k * size, 9, 1, 1) < 0.3)
        values[0] = 0
        values = values.astype(dtype)
        want = {"sum": values.sum(axis=0), "mean": values.astype("float64").mean(axis=0)}
        for op, expected in want.items():
            own = values[rank * k : (rank + 1) * k]
            dense = [mx.nd.array(x, device(i), dtype) for i, x in enumerate(own)]
            data = [array.tostype("row_sparse") for array in dense]
            gluonpar.allreduce_many([data, dense], op=op)
            for array in data:
                np.testing.assert_array_equal(array.asnumpy(), expected.astype(dtype))
                there = np.flatnonzero(expected.any((1, 2)))
                np.testing.assert_array_equal(array.indices.asnumpy(), there)
    own = mx.nd.full((4, 2), 2049).tostype("row_sparse")  # 2048 as float16
    cluster.allreduce_rows(own, compression="fp16")
    assert (own.asnumpy() == 2048 * size).all()
    with cluster.local():
        data = [mx.nd.full((2, 1), i + rank, device(i)).tostype("row_sparse") for i in range(2)]
        gluonpar.allreduce(data)
        assert data[1].asnumpy().tolist() == [[2 * rank + 1]] * 2


def summed_by_hand():
    """Check that make_parallel must stay in one process, and that a sum of gradients is enough."""
    x, w = np.arange(1.0, 4 * cluster.size(), dtype="float32"), mx.nd.ones((1,))
    mine = x[partition.slices(len(x), cluster.size())[cluster.rank()]]
    w.attach_grad()

    def squares(x):
        return (x * w.as_in_context(x.context)) ** 2

    with pytest.raises(ValueError, match=r"inside gluonpar.cluster.local\(\)"):
        gluonpar.make_parallel(squares, contexts(2), x=mine)
    with cluster.local(), autograd.record():
        loss = gluonpar.make_parallel(squares, contexts(2), x=mine).sum()
    loss.backward()
    gluonpar.allreduce([w.grad])
    assert w.grad.asscalar() == (2 * x**2).sum()


def exchanged():
    """Check sums of several arrays, of large ones and of compressed ones, and of numbers."""
    rank, size = cluster.rank(), cluster.size()
    several = [mx.nd.full((n,), rank + n, dtype=d) for n, d in ((3, "float32"), (2, "int32"))]
    several += [mx.nd.full((4,), rank + 4.0), mx.nd.full((2, 3), rank + 6.0, ctx=device(1))]
    cluster.allreduce(array for array in several)
    for array in several:
        n = array.size
        assert (array.asnumpy() == sum(r + n for r in range(size))).all(), array
    for n in (1 << 21, 2_500_001):  # from 8 MiB on in blocks, the last of a part shorter
        for dtype in ("float32", "float64", "int32"):
            values = np.arange(n) % 1000
            x = mx.nd.array(values + rank, dtype=dtype)
            cluster.allreduce([x])
            assert (x.asnumpy() == values * size + size * (size - 1) // 2).all(), (n, dtype)
    with mx.util.np_shape(True):
        x = mx.np.array(np.arange(40) % size == rank, "bool")
    cluster.allreduce([x])
    assert x.asnumpy().all() and x.dtype == np.bool_
    rng = np.random.RandomState(0)
    values = rng.randn(size, 1001).astype("float32")
    x = mx.nd.array(values[rank])
    cluster.allreduce([x], compression="fp16")
    halves = values.astype("float16").astype("float32")
    want = sum(halves[1:], halves[0]).astype("float16").astype("float32")
    assert x.asnumpy().tobytes() == want.tobytes()
    later = cluster.PendingGather(rank + 1, "numbers")
    assert later.wait() == [*range(1, size + 1)]
    assert cluster.gather(("a", rank)) == [("a", r) for r in range(size)]
    assert cluster.total([rank, 1.0]).tolist() == [size * (size - 1) / 2, size]
    assert cluster.local_rank() == rank  # all are on one host
    data = {"a": [bytes(range(200)), 1.5]}
    assert cluster.broadcast_object(data if rank == 0 else None) == data
    numbers = [np.arange(20.0 * (r + 1)).reshape(r + 1, 20) + r for r in range(size)]
    gathered = cluster.gather_to_first(numbers[rank])
    assert len(gathered) == (0 if rank else size)
    assert all((got == want).all() for got, want in zip(gathered, numbers))
    store = mx.kv.create("gluonpar")
    assert (store.rank, store.num_workers) == (rank, size)


def refused_on_all(function, words):
    """Check that each rank gets an error with these words."""
    message = None
    try:
        function()
    except (ValueError, FloatingPointError) as error:
        message = str(error)
    messages = cluster.gather(message)
    assert all(words in str(message) for message in messages), (words, messages)


def measured():
    """Check losses and accuracy of what ranks have a part of, or all, or nothing of."""
    rank, size = cluster.rank(), cluster.size()
    meter = LossMeter()
    for i in range(rank + 1):
        meter.add([mx.nd.full((2,), i + 1.0, device(0))], [mx.nd.ones((1,), device(0))])
    added = [i + 1 for number in range(1, size + 1) for i in range(number)]
    assert meter.read() == np.mean(added) and meter.num_batches == size
    meter.add([mx.nd.ones((1,), device(0))])
    if rank == size - 1:
        meter.add([mx.nd.ones((1,), device(0))], [mx.nd.full((1,), np.nan, device(0))])
    refused_on_all(meter.read, f"NaN in the update after batch {size + 2}")
    refused_on_all(lambda: cluster.total([0] * rank), "(0,), (1,)")

    n = 4 * size - 3
    scores = np.eye(5, dtype="float32")[np.arange(n) % 5]
    labels = np.where(np.arange(n) < n // 2, np.arange(n) % 5, 4)  # in the first half all are right
    share = (scores.argmax(axis=1) == labels).mean()

    def accuracy(part, **options):
        how = [None] * 2, contexts(2), lambda X, _: X
        return gluonpar.metrics.accuracy(scores[part], labels[part], *how, **options)

    everything, none = slice(0, n), slice(0, 0)
    assert accuracy(everything) == share
    cuts = sorted(np.random.RandomState(1).randint(0, n, size - 1))
    for ends in ([0, *cuts, n], [0, *[0] * (size - 1), n], [0, *[n] * size]):  # some are empty
        assert accuracy(slice(ends[rank], ends[rank + 1]), own_part=True) == share, ends
    for part in (slice(4 * rank, 4 * rank + 1), slice(0, n - rank), none if rank else everything):
        refused_on_all(lambda part=part: accuracy(part), "own_part=True")
    refused_on_all(lambda: accuracy(everything, own_part=rank == 0), "own_part is ")
    for own_part in (False, True):
        refused_on_all(lambda: accuracy(none, own_part=own_part), "at least 1 image, got 0")  # noqa: B023
    labels = labels[: n - (rank == 1)]
    refused_on_all(lambda: accuracy(everything), "rank 1: labels must be one per image")


def in_nest(samples):
    labels, images, boxes = zip(*samples)
    images = {"image": mx.nd.array(np.stack(images, axis=1))}  # samples along axis 1
    return mx.nd.array(labels), images, [mx.nd.array(each) for each in boxes]


def loaded(num_workers):
    """Check each rank's parts, and those of ranks without samples, of what DataLoader loads."""
    rank, size = cluster.rank(), cluster.size()
    n, batch_size = 2 * size + 1, 2 * size
    boxes = [np.full((i + 1, 4), i, "float32") for i in range(n)]
    images = np.arange(n * 3, dtype="float32").reshape(n, 3)

    np.random.seed(20 + rank)  # rank 0's is what counts
    dataset = [*zip(range(n), images, boxes)]
    how = {"shuffle": True, "batchify_fn": in_nest, "num_workers": num_workers}
    loader, others = gluonpar.DataLoader(dataset, batch_size, **how), np.random.RandomState(20)
    for _ in range(2):
        order, found = [*range(n)], []
        others.shuffle(order)
        for whole in (order[:batch_size], order[batch_size:]):
            mine = whole[2 * rank : 2 * rank + 2]
            found.append((len(whole), mine))
        assert len(loader) == len(found)
        for (number, mine), (labels, images_of, boxes_of) in itertools.zip_longest(found, loader):
            assert (loader.num_samples, labels.asnumpy().tolist()) == (number, mine)
            assert images_of["image"].asnumpy().tolist() == images[mine].T.tolist()
            assert [each.shape for each in boxes_of] == [(i + 1, 4) for i in mine]
            if not mine:
                assert not gluonpar.split_and_load(labels, contexts(2))
                assert not gluonpar.split_samples((labels, boxes_of), contexts(2))
    unlike = gluonpar.DataLoader(dataset[: n - (rank == size - 1)], batch_size)
    refused_on_all(lambda: next(iter(unlike)), f"{n}, {n - 1}], by rank")
    endless = gluonpar.DataLoader(
        np.arange(1), 9999, sampler=itertools.repeat(0), last_batch="keep"
    )
    refused_on_all(lambda: next(iter(endless)), "a sampler must end")
    with cluster.local():
        alone = gluonpar.DataLoader(np.arange(3), 2)
        assert [batch.size for batch in alone] == [2, 1]


def normalised():
    """Check SyncBatchNorms in unlike parts of batches, inside local() and in a plain loop."""
    rank, size = cluster.rank(), cluster.size()
    ctx, every = contexts(2), np.arange(2.0 * size)
    first, second = [gluonpar.SyncBatchNorm(in_channels=1, prefix="norm_") for _ in range(2)]
    with cluster.local():
        inside = gluonpar.SyncBatchNorm(in_channels=1)
    for layer in (first, second, inside):
        layer.initialize(ctx=ctx)

    def running_mean(layer, num_tasks=2, failing=-1, numbers=every):
        """Train on one of ``numbers`` per device; a task of rank ``failing`` fails."""

        def task(c):
            number, dtype = numbers[2 * rank + c.device_id], layer.gamma.dtype
            with autograd.record():
                layer(mx.nd.full((1, 1), number, c, dtype))
            if failing == rank:
                raise KeyError("the cat")

        gluonpar.run_tasks(task, ctx[:num_tasks], ctx)
        return layer.running_mean.data(ctx[1]).asscalar()

    def close(got, want):
        np.testing.assert_allclose(got, want, rtol=1e-5)

    close(running_mean(first), 0.1 * every.mean())
    close(running_mean(inside), 0.1 * every[2 * rank :][:2].mean())
    for without in (0, size - 1):  # this rank has no task, and the next one a task less
        numbers = {without: 0, (without + 1) % size: 1}
        used = [2.0 * r + i for r in range(size) for i in range(numbers.get(r, 2))]
        want = 0.9 * second.running_mean.data(ctx[1]).asscalar() + 0.1 * np.mean(used)
        close(running_mean(second, numbers.get(rank, 2)), want)
    wide = gluonpar.SyncBatchNorm(in_channels=1)
    wide.initialize(ctx=ctx)
    wide.cast("float64")  # in which another order of adding gives 4 or 5
    close(running_mean(wide, 2 * (rank < 2), numbers=[1, 1e16, -1e16, 3]), 0.1 * 3 / 4)
    if not rank:
        with cluster.local():  # alone
            close(running_mean(first), 0.9 * 0.1 * every.mean() + 0.1 * every[:2].mean())
    one = gluonpar.SyncBatchNorm(in_channels=1)
    one.initialize(ctx=device(0))
    for _ in range(2):  # a plain loop
        with autograd.record():
            out = one(mx.nd.full((1, 1), rank, device(0)))
        out.backward()
    close(one.running_mean.data().asscalar(), 0.19 * np.arange(size).mean())
    late = gluonpar.SyncBatchNorm(in_channels=1, timeout_seconds=1)
    late.initialize(ctx=ctx)

    def after_the_others():
        if rank == 1:
            cluster.gather(None)
        try:
            running_mean(late)
        finally:
            if rank != 1:
                cluster.gather(None)

    for words, function in (
        ("1 has not come after 1 s", after_the_others),
        ("the ranks differ in call", lambda: running_mean(first if rank else second)),
        ("rank 1: a task failed", lambda: running_mean(first, failing=1)),
    ):
        try:
            function()
        except mx.MXNetError as error:
            assert words in str(error), error
        except gluonpar.TaskError:
            assert rank == 1
        else:  # rank 1 may have the others' values before it is told that they gave up
            assert rank == 1 and function is after_the_others
        with contextlib.suppress(mx.MXNetError):  # which clears the errors of other arrays
            mx.nd.waitall()
    assert np.isfinite(running_mean(first))


def running_statistics_of_ranks(folder):
    """Check that they become the mean over all devices, or one's; and each device's from a file."""
    first, size, path = 2 * cluster.rank(), cluster.size(), pathlib.Path(folder) / "norm.npz"
    norm = gluon.nn.BatchNorm(in_channels=1)
    norm.initialize(ctx=contexts(2))
    means = norm.running_mean.list_data()

    def set_to(*values):
        for mean, value in zip(means, values):
            mean[:] = value

    for change, options, want in (
        (running_statistics.average_statistics, {}, size - 0.5),
        (running_statistics.broadcast_statistics, {"root": 3}, 3),
    ):
        set_to(first, first + 1)
        change(norm, **options)
        assert [mean.asscalar() for mean in means] == [want] * 2
    set_to(first, first + 1)
    gluonpar.save_checkpoint(path, norm)
    set_to(-1, -1)
    gluonpar.load_checkpoint(path, norm)
    assert [mean.asscalar() for mean in means] == [first, first + 1]
    header, arrays = checkpoint_files.read(path)
    in_file = [arrays[i].item() for i in dict(header["params"])["running_mean"]]
    assert in_file == [*range(2 * size)]
    # Ranks with other numbers of devices than the others, and a generator of each rank.
    mine, before = size - cluster.rank(), sum(range(size, size - cluster.rank(), -1))
    norm.collect_params().reset_ctx(contexts(mine))
    means, rng = norm.running_mean.list_data(), np.random.RandomState(cluster.rank())
    set_to(*range(before, before + mine))
    gluonpar.save_checkpoint(path, norm, rng=rng)
    want = rng.rand()
    set_to(*[-1] * mine)
    gluonpar.load_checkpoint(path, norm, rng=rng)
    assert [mean.asscalar() for mean in means] == [*range(before, before + mine)]
    assert rng.rand() == want
    with cluster.local():  # one rank of as many devices has all of the values
        alone = gluon.nn.BatchNorm(in_channels=1)
        alone.initialize(ctx=contexts(1))
        gluonpar.load_checkpoint(path, alone, rng=rng)
        assert alone.running_mean.data().asscalar() == (size * (size + 1) / 2 - 1) / 2
        assert rng.rand() == np.random.RandomState(0).rand()


def draws():
    """Check that ranks draw the same initial values, then other numbers, the same for a seed."""

    def drawn(seed):
        if seed is not None:
            mx.random.seed(seed)
        dropped = mx.nd.Dropout(mx.nd.ones((64,)), mode="always")
        return cluster.gather((mx.nd.random.uniform().asscalar(), dropped.asnumpy().tobytes()))

    unseeded = drawn(None)
    assert unseeded[0] == unseeded[-1]
    mx.random.seed(2)
    start = gluonpar.init_lenet()
    gluonpar.get_params(start, device(0))
    assert len({*drawn(None)}) == len({*drawn(2)}) == cluster.size()
    assert drawn(2) == drawn(2) != drawn(3)
    with cluster.local():
        mx.random.seed(2)
        again = gluonpar.init_lenet()
    assert all((a.asnumpy() == b.asnumpy()).all() for a, b in zip(start, again))
