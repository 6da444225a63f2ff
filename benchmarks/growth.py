"""Call each public door many times, beside MXNet alone, and print what stays after each call.

python -m benchmarks.growth
python -m benchmarks.growth --doors "new networks,hybridize again" --rounds 4 --steps 300

Each door of each library has a process of its own. There it is called some times to warm up, and
then in successive parts. After each part garbage is collected, and the kilobytes of resident
memory, the file descriptors and the threads that have been added are divided by the part's calls.
What stays for each call does so in every part.

Exit code: 0; 1 if a process failed; 2 for a request that cannot be met; 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from benchmarks import worker
from gluonpar.diagnostics import harness
from gluonpar.options import Measured, option

LIBRARIES = ("gluonpar", "mxnet")
DOORS = {}  # by name: a function of a Library, which returns what is called; and in which libraries


def door(name, *libraries):
    """Decorate a function of a :class:`Library` that prepares one door, and returns the call."""

    def register(function):
        DOORS[name] = function, libraries or LIBRARIES
        return function

    return register


class Library:
    """The library in this process, ``mx``, two CPU contexts, and what the doors share."""

    def __init__(self, name):
        worker.prepare(name, [])
        import mxnet as mx

        self.name, self.mx, self.ctx = name, mx, [mx.cpu(0), mx.cpu(1)]
        self.trainers = mx.gluon
        if name == "gluonpar":
            import gluonpar

            self.gluonpar = self.trainers = gluonpar
        self.X = [mx.nd.ones((2, 3, 8, 8), ctx=c) for c in self.ctx]

    def network(self, norm=None, hybridize=(("static_alloc", True), ("static_shape", True))):
        """Return a convolution, a normalisation and a dense layer, initialised and hybridized."""
        nn = self.mx.gluon.nn
        net = nn.HybridSequential()
        net.add(nn.Conv2D(8, 3, in_channels=3), norm() if norm else nn.BatchNorm(in_channels=8))
        net.add(nn.Dense(4, in_units=8 * 36))
        net.initialize(ctx=self.ctx)
        if hybridize is not None:
            net.hybridize(**dict(hybridize))
        return net

    def trainer(self, net):
        """Return a Trainer with a state for each parameter."""
        how = {"learning_rate": 1e-3, "momentum": 0.9}
        return self.trainers.Trainer(net.collect_params(), "sgd", how)

    def step(self, net, trainer):
        """Run forward and backward on both devices and step; wait for all."""
        with self.mx.autograd.record():
            losses = [net(X) for X in self.X]
        self.mx.autograd.backward(losses)
        trainer.step(4)
        self.mx.nd.waitall()

    def tasks_step(self, net, trainer):
        """Take :meth:`step`, in tasks."""

        def run(X):
            with self.mx.autograd.record():
                loss = net(X)
            loss.backward()

        self.gluonpar.run_tasks(run, self.X, self.ctx)
        trainer.step(4)
        self.mx.nd.waitall()

    def replicas(self):
        """Return LeNet's parameters on both devices."""
        start = self.gluonpar.init_lenet()
        return [self.gluonpar.get_params(start, c) for c in self.ctx]

    def train_batch(self, replicas):
        """Train LeNet on a small batch."""
        X, y = np.ones((4, 1, 28, 28), "float32"), np.zeros(4, "float32")
        self.gluonpar.train_batch(X, y, replicas, self.ctx, 1e-3)
        self.mx.nd.waitall()


@door("train_batch", "gluonpar")
def _train_batch(of):
    replicas = of.replicas()
    return lambda: of.train_batch(replicas)


@door("steps")
def _steps(of):
    net = of.network()
    trainer = of.trainer(net)
    return lambda: of.step(net, trainer)


@door("steps in tasks", "gluonpar")
def _steps_in_tasks(of):
    net = of.network()
    trainer = of.trainer(net)
    return lambda: of.tasks_step(net, trainer)


@door("SyncBatchNorm steps", "gluonpar")
def _sync_steps(of):
    net = of.network(norm=lambda: of.gluonpar.SyncBatchNorm(in_channels=8))
    trainer = of.trainer(net)
    return lambda: of.tasks_step(net, trainer)


def _new_networks(hybridize):
    def prepare(of):
        def call():
            net = of.network(hybridize=hybridize)
            of.step(net, of.trainer(net))

        return call

    return prepare


door("new networks")(_new_networks(None))
door("new networks hybridized")(_new_networks(()))
door("new networks static")(_new_networks((("static_alloc", True), ("static_shape", True))))


@door("new SyncBatchNorm networks", "gluonpar")
def _new_sync_networks(of):
    def call():
        net = of.network(norm=lambda: of.gluonpar.SyncBatchNorm(in_channels=8))
        of.tasks_step(net, of.trainer(net))

    return call


@door("new custom operators' networks", "mxnet")
def _new_custom_networks(of):
    """MXNet alone with an operator of Python in each network, as SyncBatchNorm has one."""
    mx = of.mx

    class Same(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], in_data[0])

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], out_grad[0])

    @mx.operator.register("growth_same")
    class SameProp(mx.operator.CustomOpProp):
        def create_operator(self, ctx, shapes, dtypes):
            return Same()

    class Block(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, X):
            return F.Custom(X, op_type="growth_same")

    def call():
        net = of.network(norm=Block, hybridize=(("static_alloc", True),))
        of.step(net, of.trainer(net))

    return call


@door("hybridize again")
def _hybridize_again(of):
    net = of.network()

    def call():
        net.hybridize(static_alloc=True, static_shape=True)
        for X in of.X:
            net(X).wait_to_read()

    return call


@door("reset_ctx")
def _reset_ctx(of):
    net, ctx = of.network(hybridize=None), of.ctx[:]
    trainer = of.trainer(net)

    def call():
        ctx.reverse()
        net.collect_params().reset_ctx(ctx)
        of.step(net, trainer)

    return call


@door("new replicas", "gluonpar")
def _new_replicas(of):
    return lambda: of.train_batch(of.replicas())


@door("parameters and states in files")
def _files(of):
    net, folder = of.network(), tempfile.TemporaryDirectory()
    trainer, path = of.trainer(net), f"{folder.name}/file"
    of.step(net, trainer)

    def call(_=folder):  # which is kept as long as this
        net.save_parameters(path)
        net.load_parameters(path, ctx=of.ctx)
        trainer.save_states(path)
        trainer.load_states(path)
        of.step(net, trainer)

    return call


@door("checkpoints", "gluonpar")
def _checkpoints(of):
    net, folder = of.network(), tempfile.TemporaryDirectory()
    trainer, path = of.trainer(net), f"{folder.name}/file"
    of.step(net, trainer)

    def call(_=folder):
        of.gluonpar.save_checkpoint(path, net, trainer)
        of.gluonpar.load_checkpoint(path, net, trainer)
        of.step(net, trainer)

    return call


@door("collectives on new arrays")
def _collectives(of):
    mx = of.mx
    store = mx.kv.create("device") if of.name == "mxnet" else None
    if store:
        store.init(0, mx.nd.ones((1000,)))

    def call():
        data = [mx.nd.ones((1000,), ctx=c) for c in of.ctx]
        if store:
            store.pushpull(0, data, out=data)
        else:
            for collective in ("allreduce", "broadcast", "reduce_scatter", "all_gather", "reduce"):
                getattr(of.gluonpar, collective)(data)
            for algorithm in ("ring", "tree"):
                of.gluonpar.allreduce(data, algorithm)
        mx.nd.waitall()

    return call


@door("errors")
def _errors(of):
    """A refusal by MXNet or gluonpar, and an error that an operator raises later."""
    mx, net = of.mx, of.network()

    def call():
        with contextlib.suppress(ValueError, mx.MXNetError):
            if of.name == "gluonpar":
                of.gluonpar.allreduce([mx.nd.ones((1,)), mx.nd.ones((2,))])
            mx.nd.ones((1,)) + mx.nd.ones((2, 3, 4))
        with contextlib.suppress(ValueError, mx.MXNetError):
            net(mx.nd.ones((2, 5, 8, 8))).wait_to_read()
        with contextlib.suppress(mx.MXNetError):
            mx.nd.random.normal(0, -1, (2,)).wait_to_read()

    return call


def _loaders(num_workers):
    def prepare(of):
        data = of.trainers if of.name == "gluonpar" else of.mx.gluon.data
        images = of.mx.gluon.data.ArrayDataset(np.ones((32, 4), "float32"))

        def call():
            for batch in data.DataLoader(images, 8, num_workers=num_workers):
                batch.wait_to_read()

        return call

    return prepare


door("loaders")(_loaders(0))
door("loaders with a worker")(_loaders(1))


def child(name, library, parts, calls):
    """Call a door in this process; print per part the kilobytes, descriptors and threads a call."""
    import psutil

    process = psutil.Process()

    def now():
        gc.collect()
        return process.memory_info().rss / 1024, process.num_fds(), process.num_threads()

    call = DOORS[name][0](Library(library))
    for _ in range(calls):
        call()
    before = now()
    for _ in range(parts):
        for _ in range(calls):
            call()
        after = now()
        print(json.dumps([(b - a) / calls for a, b in zip(before, after)]), flush=True)
        before = after


@dataclasses.dataclass(frozen=True)
class Row:
    """What one door of one library has kept: per part, kilobytes, descriptors, threads a call."""

    door: str
    library: str
    parts: list

    def as_dict(self):
        """Return all fields, for JSON."""
        return dataclasses.asdict(self)

    def line(self):
        """Return the figures of all parts, aligned."""
        cells = [", ".join(f"{part[i]:.{digits}f}" for part in self.parts) for i, digits in PRINTED]
        return harness.columns((self.door, self.library, *cells), WIDTHS)


PRINTED = ((0, 1), (1, 2), (2, 2))  # the figures, with their digits
HEADINGS, WIDTHS = ("door", "library", "KB", "descriptors", "threads"), (-31, -9, -26, -18, -18)


@dataclasses.dataclass(frozen=True)
class Asked(Measured):
    """The options."""

    about = __doc__.partition("\n")[0]

    doors: tuple[str, ...] = option(tuple(DOORS), "what to call (all)", "A,B", choices=DOORS)
    rounds: int = option(3, "successive parts (%(default)s)", "N", least=1)
    steps: int = option(300, "calls in each part, and to warm up (%(default)s)", "N", least=1)


def measure(prepared, console, record):
    """Print a line for each door and library; return complaints."""
    options, failed = record.options, []
    record.header(console, {"figures": f"per call, in {options.rounds} parts of {options.steps}"})
    console.line("\n" + harness.columns(HEADINGS, WIDTHS))
    root = pathlib.Path(__file__).resolve().parents[1]
    for name in options.doors:
        for library in DOORS[name][1]:
            sizes = [str(options.rounds), str(options.steps)]
            command = [sys.executable, "-m", "benchmarks.growth", "child", name, library, *sizes]
            done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                failed.append(f"failed: {name}, {library}")
                continue
            record.rows.append(Row(name, library, [*map(json.loads, done.stdout.splitlines())]))
            console.line(record.rows[-1].line())
            record.write()
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:4], *map(int, sys.argv[4:]))
    else:
        sys.exit(harness.conduct(Asked, None, lambda _: None, measure, "benchmarks.growth"))
