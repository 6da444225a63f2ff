"""A user's program has types: mypy and pyright accept it, and find a wrong call of the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import gluonpar
from tests.support.processes import end

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """\
from __future__ import annotations

import gluonpar
import mxnet as mx
from gluonpar import cluster
from gluonpar.collectives import explain, trace
from mxnet import autograd, gluon

ctx = [mx.cpu(0), mx.cpu(1)]
X, y = mx.nd.ones((4, 1, 28, 28)), mx.nd.zeros((4,))
params = gluonpar.init_lenet(scale=0.1)
device_params = [gluonpar.get_params(params, c) for c in ctx]
losses: list[mx.nd.NDArray] = gluonpar.train_batch(X, y, device_params, ctx, lr=0.1)


@gluonpar.traceable
def model(X: mx.nd.NDArray, params: list[mx.nd.NDArray]) -> mx.nd.NDArray:
    return gluonpar.lenet(X, params)


scores: mx.nd.NDArray = model(X, params)
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(4, in_units=784), gluonpar.SyncBatchNorm(in_channels=4))
net.initialize(ctx=ctx)
trainer = gluonpar.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, algorithm="ring")
for X_shard, y_shard in gluonpar.split_and_load((X, y), ctx):
    with autograd.record():
        loss = net(X_shard.reshape((-1, 784))).sum(axis=1)
    loss.backward()
trainer.step(4)
data = [mx.nd.ones((3,), ctx=c) for c in ctx]
gluonpar.allreduce(data, algorithm=explain(data).algorithm, op="mean")
if cluster.rank() == 0:
    print(cluster.size(), trace("ring", 4), gluonpar.metrics.LossMeter().read())
"""
WRONG = {
    "gluonpar.split_and_load((X, y))": "ctx",
    "gluonpar.train_batch(X, y, device_params, ctx)": "lr",
    "gluonpar.allreduce(data, opp='mean')": "opp",
    "gluonpar.allreduce(data, algorithm=3)": "algorithm",
    "model(X)": "params",
    "gluonpar.all_reduce(data)": "all_reduce",
}
COMMANDS = {
    "mypy": ["--ignore-missing-imports", "--python-executable", sys.executable],
    "pyright": ["--pythonpath", sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", COMMANDS)
def test_a_program_passes_and_each_wrong_call_is_found(checker, tmp_path):
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: it needs Python 3.10")
    path, lines = tmp_path / "program.py", PROGRAM.count("\n")
    # MXNet has no types, and what pyright reads from its code is often wrong.
    (tmp_path / "pyrightconfig.json").write_text('{"useLibraryCodeForTypes": false}', "utf-8")

    def errors(text):
        path.write_text(text, "utf-8")
        command = ("-m", checker, *COMMANDS[checker], path.name)
        done = end(*command, cwd=tmp_path, PYTHONPATH=str(ROOT))
        found = [line for line in done.stdout.splitlines() if " error: " in line]
        assert done.returncode == bool(found), done.stdout + done.stderr
        return found

    names = "\n".join(f"print(gluonpar.{name})" for name in dir(gluonpar))
    assert errors(f"{PROGRAM}{names}\n") == [] and "SyncBatchNorm" in names and "cluster" in names
    found = errors(PROGRAM + "\n".join(WRONG))
    assert len(found) == len(WRONG)
    for i, (line, name) in enumerate(zip(found, WRONG.values()), lines + 1):
        assert f"program.py:{i}:" in line and name in line
