"""gluonpar.Trainer where gluon.Trainer was: arguments, methods, and what others override."""

import functools
import inspect
import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

import gluonpar
from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.contexts import contexts
from tests.support.gluon_runs import give_grads, weights

GRADS = [[[1.0, 2.0], [4.0, 8.0]], [[0.5, 0.25], [2.0, 1.0]], [[3.0, 1.0], [1.0, 5.0]]]


def params_for(k=2):
    """Two parameters of different dtypes, so in different buckets, which two devices own."""
    return [weights([[1.0, 2.0]], k)[0], weights([[0.0], [4.0]], k, dtype="float64")[1]]


def values(params):
    return [[array.asnumpy().tolist() for array in param.list_data()] for param in params]


def test_the_positional_arguments_are_those_of_stock():
    stock = list(inspect.signature(gluon.Trainer).parameters.values())
    ours = list(inspect.signature(Trainer).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(stock)]] == [(p.name, p.default) for p in stock]
    assert {p.kind for p in ours[len(stock) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("options", [(), (None,), ("nccl", None, False), ("gluonpar", {}), "kv"])
def test_every_kvstore_of_one_process_sums(options):
    if options == "kv":
        options = (mx.kv.create("device"),)
    params = params_for()
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, *options)
    give_grads(params, [[1.0, 2.0], [4.0, 8.0]])
    trainer.step(1)
    assert values(params) == [[[-2.0, -1.0]] * 2, [[-8.0]] * 2]


@pytest.mark.parametrize("momentum", [0, 0.9])
@pytest.mark.parametrize("wd", [0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_sgd_on_two_devices_has_the_bits_of_gluon_trainer(momentum, wd, clip):
    options = {"learning_rate": 0.3, "momentum": momentum, "wd": wd, "clip_gradient": clip}
    results = []
    for make in (Trainer, functools.partial(gluon.Trainer, update_on_kvstore=False)):
        net = runs.mlp(contexts(2))
        runs.train(net, make(net.collect_params(), "sgd", options), runs.batches(), contexts(2))
        results.append([value.tobytes() for value in runs.values(net)])
    assert results[0] == results[1]


def clip_first(params):
    """Change the gradients of the first device only."""
    gluon.utils.clip_global_norm([params[0].list_grad()[0]], 1.5)
    params[1].list_grad()[0][:] *= 0.5


def initialized(trainer):
    if not trainer._kv_initialized:
        trainer._init_kvstore()
        trainer._init_params()


PROGRAMS = {
    "step": lambda trainer, params: trainer.step(2),
    "two halves": lambda trainer, params: (trainer.allreduce_grads(), trainer.update(2)),
    "underscores": lambda trainer, params: (
        initialized(trainer),
        trainer._check_and_rescale_grad(0.5),
        trainer._allreduce_grads(),
        trainer._update(),
    ),
    "clipped": lambda trainer, params: (
        trainer.allreduce_grads(),
        clip_first(params),
        trainer.update(2),
    ),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
@pytest.mark.parametrize("program", [*PROGRAMS, "mixed"])
def test_programs_give_on_every_device_what_stock_gives_on_the_first(program, optimizer):
    results = []
    for kind in (gluon.Trainer, Trainer):
        params = params_for()
        options = {"learning_rate": 0.5, "wd": 0.1}
        trainer = kind(params, optimizer, options, update_on_kvstore=False)
        for step, grads in enumerate(GRADS):
            give_grads(params, grads)
            name = ["step", "clipped", "step"][step] if program == "mixed" else program
            PROGRAMS.get(name, PROGRAMS["step"])(trainer, params)
        results.append(values(params))
    stock, ours = results
    for want, got in zip(stock, ours):
        assert got == [got[0]] * 2
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_the_first_step_copies_running_statistics_and_values_of_the_first_device():
    results = []
    for kind in (gluon.Trainer, Trainer):
        norm = gluon.nn.BatchNorm(in_channels=1, prefix="norm_")
        norm.initialize(ctx=contexts(2))
        norm.beta.list_data()[1][:] = 5
        trainer = kind(norm.collect_params(), "sgd", {"learning_rate": 0.5})
        for step in range(2):
            for i, c in enumerate(contexts(2)):
                with autograd.record():
                    out = norm(mx.nd.array([[1.0], [2.0 + i + step]], ctx=c)) ** 2
                out.backward()
            trainer.step(4)
            params = norm.collect_params().values()
            results.append([[a.asscalar() for a in param.list_data()] for param in params])
    for want, got in zip(results[:2], results[2:]):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len({*results[2][2]}) == 1 and len({*results[3][2]}) == 2


@pytest.mark.parametrize("load", [Trainer.load_states, gluon.Trainer.load_states])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb", "nag"])
def test_states_of_gluon_trainer_go_on(tmp_path, optimizer, load):
    """One step, its states into gluonpar's Trainer, two more steps; or all three in one."""
    options = {"learning_rate": 0.5, "momentum": 0.9} if optimizer in ("sgd", "nag") else {}
    results, path = [], str(tmp_path / "states")
    for change in (False, True):
        params = params_for()
        trainer = gluon.Trainer(params, optimizer, dict(options), update_on_kvstore=False)
        give_grads(params, GRADS[0])
        trainer.step(2)
        if change:
            trainer.save_states(path)
            trainer = Trainer(params, optimizer, dict(options))
            load(trainer, path)
        for grads in GRADS[1:]:
            give_grads(params, grads)
            trainer.step(2)
        results.append(values(params))
    for want, got in zip(*results):
        np.testing.assert_allclose(got, want, rtol=1e-6)


SCHEDULES = {
    "none": lambda: None,
    "factor": lambda: mx.lr_scheduler.FactorScheduler(2, 0.5),
    "steps": lambda: mx.lr_scheduler.MultiFactorScheduler([1, 2]),
    "poly": lambda: mx.lr_scheduler.PolyScheduler(9, warmup_steps=2),
    "cosine": lambda: mx.lr_scheduler.CosineScheduler(9),
}


@pytest.mark.filterwarnings("ignore:learning rate from")
@pytest.mark.parametrize("optimizer", runs.OF_MXNET)
def test_a_file_of_stock_has_the_states_of_a_trusted_one_and_runs_nothing(
    tmp_path, monkeypatch, optimizer
):
    """Of each of MXNet's optimizers, with its schedules; of two with float32 copies of weights."""
    kind, path = mx.optimizer.Optimizer.opt_registry[optimizer], str(tmp_path / "states")
    has_copies = optimizer in ("sgd", "nag")
    for schedule in SCHEDULES.values():
        params = weights([[[1.0, 2.0]]], 1, dtype="float16" if has_copies else "float32")
        made = [kind(lr_scheduler=schedule(), rescale_grad=np.float32(0.5)) for _ in range(3)]
        for each in made:
            each.multi_precision = has_copies
        stock = gluon.Trainer(params, made[0], kvstore=None)
        give_grads(params, [[1.0]])
        stock.step(2)
        stock.save_states(path)
        trusting, reading = (Trainer(params, each) for each in made[1:])
        trusting.load_states(path, trusted=True)
        with monkeypatch.context() as patched:
            for each in (mx.nd.NDArray, kind):
                patched.setattr(each, "__setstate__", None)
            reading.load_states(path)
        assert runs.training_state(reading) == runs.training_state(trusting)
        assert runs.training_state(reading)[0]


OTHERS = "could run any code.*trusted=True"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"\x80\x02cposix\nsystem\nX\x06\0\0\0exit 7\x85R.", f"posix.system.*{OTHERS}"),
        (pickle.dumps(({}, print)), f"builtins.print.*{OTHERS}"),
        (pickle.dumps((mx.optimizer.Optimizer.create_optimizer, {})), OTHERS),
        (pickle.dumps({"no": "states"}), ""),
        (pickle.dumps(({}, mx.optimizer.Adam())), "of optimizer Adam, but this one is SGD"),
        (pickle.dumps(({}, mx.optimizer.SGD()))[:-9], ""),
    ],
)
def test_another_file_is_refused_and_nothing_changes(tmp_path, content, words):
    trainer = Trainer(params_for(), "sgd")
    before = runs.training_state(trainer)
    (tmp_path / "states").write_bytes(content)
    with pytest.raises(ValueError, match=f"states cannot be loaded: .*{words}"):
        trainer.load_states(str(tmp_path / "states"))
    assert runs.training_state(trainer) == before


def differentiate(params):
    """Backward on one or two devices, of a batch of three samples."""
    shares = {1: [3], 2: [1, 2]}[len(params[0].list_ctx())]
    with autograd.record():
        losses = [
            sum((param.data(c) ** 2).sum().astype("float32") for param in params) * share
            for c, share in zip(params[0].list_ctx(), shares)
        ]
    autograd.backward(losses)


def assert_as_one(params, want):
    for copies, value in zip(values(params), values(want)):
        assert copies == [copies[0]] * len(copies)
        np.testing.assert_allclose(copies[0], value[0], rtol=1e-6)


@pytest.mark.parametrize("sums_first", [False, True])
def test_an_update_by_parts_of_gradients_is_refused_and_a_step_is_right(sums_first):
    """On one device there are no parts."""
    made = []
    for make, k in ((gluon.Trainer, 1), (Trainer, 1), (Trainer, 2)):
        params = params_for(k)
        trainer = make(params, "sgd", {"learning_rate": 0.1})
        for _ in range(2):
            if sums_first:
                trainer.allreduce_grads()
            differentiate(params)
            if k == 1:
                trainer.update(3)
            else:
                with pytest.raises(ValueError, match="call allreduce_grads()"):
                    trainer.update(3)
                trainer.step(3)
        made.append(params)
    for params in made[1:]:
        assert_as_one(params, made[0])


def allreduce_each(lists):
    for grads in lists:
        gluonpar.allreduce(grads)


@pytest.mark.parametrize("sum_up", [gluonpar.allreduce_many, allreduce_each])
def test_sums_that_a_program_makes_are_sums(sum_up):
    params = params_for()
    trainer = Trainer(params, "sgd", {"learning_rate": 0.5})
    for _ in range(2):  # of the same arrays: their sum is prepared then
        differentiate(params)
        sum_up([param.list_grad() for param in params])
        trainer.update(2)
    differentiate(params)
    with pytest.raises(ValueError, match="call allreduce_grads()"):
        trainer.update(2)
