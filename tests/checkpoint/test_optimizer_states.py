"""save_states and load_states: training continues bit for bit, or nothing is changed."""

import functools
import re
import threading
import warnings
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from gluonpar.gluon.trainer import Trainer
from tests.support import gluon_runs as runs
from tests.support.checkpoint_files import set_in_header
from tests.support.contexts import device
from tests.support.gluon_runs import assert_as_one, contexts, give_grads, weights

MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}


def start(name, options=MOMENTUM, make=runs.mlp):
    net = make(contexts(2))
    return net, Trainer(net.collect_params(), name, dict(options))


def steps(params, trainer, number, grads=(1.0, 2.0)):
    """Return the first parameter's value on the last device."""
    for _ in range(number):
        give_grads(params, [grads] * len(params))
        trainer.step(1)
    return params[0].list_data()[-1].asnumpy().tolist()


def assert_same_bits(net, other):
    assert [a.tobytes() for a in runs.values(net)] == [a.tobytes() for a in runs.values(other)]


def test_states_can_be_loaded_before_shapes_are_known(tmp_path):
    """As when resuming a network whose shapes depend on its first batch, in a new process."""
    net, trainer = start("adam", {})
    runs.train(net, trainer, runs.batches()[:3], contexts(2))
    trainer.save_states(tmp_path / "s")
    again, other = start("adam", {}, functools.partial(runs.mlp, deferred=True))
    for layer in again:
        layer.weight._shape = (layer.weight.shape[0], 0)  # it was known from the values
    other.load_states(tmp_path / "s")
    runs.fill(again, runs.values(net))
    for one, two in ((net, trainer), (again, other)):
        runs.train(one, two, runs.batches()[3:], contexts(2))
    assert_same_bits(net, again)


class Lookahead(mx.optimizer.SGD):
    """Zhang et al. 2019, with slow weights and counters on itself, and an inner schedule."""

    def __init__(self, k=3, **options):
        super().__init__(**options)
        self.k, self.slow, self.steps = k, {}, {}

    def update_multi_precision(self, index, weight, grad, state):
        for i, fast in zip(index, weight):
            self.slow.setdefault(i, fast.copy())
            assert self.slow[i].context == fast.context  # MXNet checks that on GPUs only
        super().update_multi_precision(index, weight, grad, state)
        for i, fast in zip(index, weight):
            self.steps[i] = self.steps.get(i, 0) + 1
            if self.steps[i] % self.k == 0:
                self.slow[i] += 0.5 * (fast - self.slow[i])
                fast[:] = self.slow[i]


class Chain(mx.lr_scheduler.LRScheduler):
    """Several schedules in turn; every call changes all of them."""

    def __init__(self, *parts):
        super().__init__()
        self.parts, self.calls = parts, {"last": 0, "count": 0}

    def __call__(self, num_update):
        if num_update > self.calls["last"]:
            self.calls = {"last": num_update, "count": self.calls["count"] + 1}
            for part in self.parts:
                part.base_lr *= 0.9
        return self.parts[self.calls["count"] // 2 % len(self.parts)].base_lr


factor = functools.partial(mx.lr_scheduler.FactorScheduler, 2, 0.5, base_lr=0.3)
multifactor = functools.partial(mx.lr_scheduler.MultiFactorScheduler, [1, 4], 0.5, base_lr=0.1)
cosine = functools.partial(mx.lr_scheduler.CosineScheduler, 8, 0.1, warmup_steps=3)


def chain():
    return Chain(factor(), mx.lr_scheduler.CosineScheduler(99, 0.1))


# The optimizer, and the arguments of the Trainer that saves and of the one that loads.
CASES = {
    "decay": ("sgd", {**MOMENTUM, "wd": 0.01}, MOMENTUM),
    "adam": ("adam", {"lr_scheduler": cosine}, {}),
    "nadam": ("nadam", {"lr_scheduler": multifactor}, {}),
    "lamb": ("lamb", {}, {}),
    "lars": ("lars", MOMENTUM, MOMENTUM),
    "ftml": ("ftml", {}, {}),
    "dcasgd": ("dcasgd", {}, {}),
    "signum": ("signum", MOMENTUM, MOMENTUM),
    "LBSGD": ("lbsgd", {**MOMENTUM, "batch_scale": 4, "updates_per_epoch": 2}, MOMENTUM),
    "Lookahead": (Lookahead, MOMENTUM, {"k": 2}),
    "clipping": ("sgd", {**MOMENTUM, "clip_gradient": 0.01}, MOMENTUM),
    "no clipping": ("sgd", MOMENTUM, {**MOMENTUM, "clip_gradient": 0.01}),
    "momentum": ("nag", MOMENTUM, {}),
    "no momentum": ("sgd", {"learning_rate": 0.1}, MOMENTUM),
    "more states": ("rmsprop", {"centered": True}, {}),
    "schedule": ("sgd", {"lr_scheduler": factor}, {"learning_rate": 0.3}),
    "no schedule": ("sgd", {"learning_rate": 0.3}, {"lr_scheduler": factor}),
    "another schedule": ("sgd", {"lr_scheduler": chain}, {"lr_scheduler": factor}),
    "nested schedules": ("adam", {"lr_scheduler": chain}, {"lr_scheduler": chain}),
}


def made(optimizer, options):
    kind = Lookahead if optimizer is Lookahead else mx.optimizer.Optimizer.opt_registry[optimizer]
    return kind(**{name: v() if callable(v) else v for name, v in options.items()})


@functools.lru_cache(None)
def expected(case):
    optimizer, options, _ = CASES[case]
    return runs.stock(made(optimizer, options), data=[*runs.batches(), *runs.batches()])


@pytest.mark.filterwarnings("ignore:the saved learning-rate schedule")  # and see below
@pytest.mark.filterwarnings("ignore:.* is saved as a pickle")
@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("ks", "algorithm"), [((2, 2), None), ((3, 2), None), ((1, 3), "ring")])
@pytest.mark.parametrize("case", CASES)
def test_training_continues_by_the_saved_optimizer_as_in_gluon_trainer(
    case, ks, algorithm, tmp_path
):
    """To the bit on as many devices; the saved arguments replace all that were given."""
    optimizer, saved, given = CASES[case]
    data, path = [*runs.batches(), *runs.batches()], tmp_path / "states"
    net, again = (runs.mlp(contexts(k)) for k in ks)
    trainer = Trainer(net.collect_params(), made(optimizer, saved), algorithm=algorithm)
    other = Trainer(again.collect_params(), made(optimizer, given), algorithm=algorithm)
    runs.train(net, trainer, data[:4], contexts(ks[0]))
    runs.train(again, other, data[:1], contexts(ks[1]))
    trainer.save_states(path)
    other.load_states(str(path), trusted=saved.get("lr_scheduler") is chain)
    assert other.learning_rate == trainer.learning_rate
    assert runs.training_state(other)[:3] == runs.training_state(trainer)[:3]
    runs.fill(again, runs.values(net))
    for one, two, k in ((net, trainer, ks[0]), (again, other, ks[1])):
        runs.train(one, two, data[4:], contexts(k))
        if case != "LBSGD":  # see test_lbsgd_adds_up_gradients
            assert_as_one(one, expected(case))
    assert_as_one(again, runs.values(net))
    if ks[0] == ks[1]:
        assert_same_bits(net, again)


def layers(first):
    """Four equal layers, dense{first} and so on: gluon.Trainer sorts dense10 before dense9."""
    net = mx.gluon.nn.Sequential(prefix="")
    for i in range(first, first + 4):
        net.add(mx.gluon.nn.Dense(6, "tanh", in_units=6, prefix=f"dense{i}_"))
    net.initialize(ctx=contexts(2))
    rng = np.random.RandomState(0)
    runs.fill(net, [rng.normal(0, 0.5, p.shape) for p in net.collect_params().values()])
    return net


@pytest.mark.filterwarnings("ignore:.* is saved as a pickle")
@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("firsts", [(8, 0), (0, 8), (8, 98)])
def test_states_belong_to_layers_however_their_names_sort(firsts, pickled, tmp_path):
    """And what LBSGD has by the parameters' indices: gradients that it adds up, and multipliers."""
    pairs = []
    for first in firsts:
        net = layers(first)
        pairs.append((net, Trainer(net.collect_params(), *CASES["LBSGD"][:2])))
    (net, trainer), (again, other) = pairs
    indices = [of._param2idx[f"dense{n}_weight"] for (_, of), n in zip(pairs, firsts)]
    trainer.optimizer.set_lr_mult({indices[0]: 0.5})
    trainer.optimizer.mine = {"a set"} if pickled else None
    runs.train(net, trainer, runs.batches()[:3], contexts(2))
    trainer.save_states(tmp_path / "s")
    other.load_states(tmp_path / "s", trusted=pickled)
    assert other.optimizer.lr_mult == {indices[1]: 0.5}
    runs.fill(again, runs.values(net))
    for pair in pairs:
        runs.train(*pair, runs.batches()[3:], contexts(2))
    assert_same_bits(net, again)


def test_an_optimizer_of_the_programs_own_is_refused_if_the_order_changed(tmp_path):
    first, second = (Trainer(layers(n).collect_params(), Lookahead()) for n in (8, 0))
    first.save_states(tmp_path / "s")
    assert_refused(second, tmp_path / "s", "Lookahead")


def test_plain_attributes_are_restored(tmp_path):
    trainer, other = (Trainer(weights([[1.0, 2.0]], 2), Lookahead()) for _ in range(2))
    half = mx.nd.array([1, 2], dtype="float16", ctx=device(1))
    trainer.optimizer.arrays = [half, {"wide": mx.np.array([3.5])}, np.arange(3, dtype="u1")]
    trainer.optimizer.numbers = (np.float32(0.1), float("inf"), -(10**30), True, None, "text")
    trainer.save_states(tmp_path / "s")
    other.load_states(tmp_path / "s")
    (first, inner, small), ctx = other.optimizer.arrays, contexts(2)[0]
    assert first.context == ctx and first.dtype == np.float16 and first.asnumpy().tolist() == [1, 2]
    assert type(inner["wide"]) is mx.np.ndarray and inner["wide"].asnumpy().tolist() == [3.5]
    assert small.dtype == np.uint8 and small.tolist() == [0, 1, 2]
    numbers = other.optimizer.numbers
    assert numbers == trainer.optimizer.numbers and type(numbers[0]) is np.float32


def test_states_of_an_earlier_program_are_read():
    """The file was written after three steps when 0.3.0's format was new."""
    params = weights([[1.0, 2.0], [3.0]], 2)
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.25)
    options = {"learning_rate": 0.25, "lr_scheduler": schedule, "wd": 0.125}
    trainer = Trainer(params, "adam", options)
    trainer.optimizer.set_lr_mult({0: 0.5})

    steps(params, trainer, 3)
    reached = [param.data(device(0)).copy() for param in params]
    steps(params, trainer, 2)
    want = runs.training_state(trainer)
    for param, value in zip(params, reached):
        param.set_data(value)
    path = Path(__file__).parent / "former" / "adam.states"
    trainer.load_states(path)
    assert trainer.optimizer.lr_mult == {0: 0.5} and trainer.learning_rate == 0.125
    steps(params, trainer, 2)
    assert runs.training_state(trainer) == want


EXPLODED = []


def explode():
    EXPLODED.append("unpickled")


class Bomb:
    def __reduce__(self):
        return explode, ()


def test_other_attributes_are_pickled_and_read_only_if_trusted(small):
    trainer, path = small
    trainer.optimizer.mine = Bomb, np.random.RandomState(0), {1, 2}
    trainer.optimizer.bomb = Bomb()
    with pytest.warns(UserWarning, match=r"optimizer\.bomb is of type Bomb.* trusted=True"):
        trainer.save_states(path)
    before = path.read_bytes()
    assert_refused(trainer, path, "any code.*trusted=True")
    assert EXPLODED == []
    trainer.load_states(path, trusted=True)
    assert EXPLODED.pop() == "unpickled"
    kind, generator, numbers = trainer.optimizer.mine
    assert kind is Bomb and numbers == {1, 2}
    assert generator.uniform() == np.random.RandomState(0).uniform()
    trainer.optimizer.mine = threading.Lock()
    with pytest.raises(ValueError, match=r"optimizer\.\w+ is of type .*cannot be saved"):
        trainer.save_states(path)
    assert path.read_bytes() == before
    assert_refused(
        Trainer(weights([[1.0, 2.0]], 1), "adam"), path, "of optimizer SGD", trusted=True
    )
    EXPLODED.clear()


def test_an_object_in_two_places_stays_one(small):
    trainer, path = small
    trainer.optimizer.first = trainer.optimizer.second = [1.0]
    with pytest.warns(UserWarning, match="optimizer.second is in a second place.* is saved as a"):
        trainer.save_states(path)
    trainer.load_states(path, trusted=True)
    assert trainer.optimizer.first is trainer.optimizer.second


@pytest.mark.filterwarnings("ignore:the saved learning-rate schedule.*base_lr is 0.3, here 7")
def test_two_trainers_keep_their_common_schedule(tmp_path):
    schedule = factor()
    one, two = (Trainer(weights([[1.0]], 1), "sgd", {"lr_scheduler": schedule}) for _ in range(2))
    one.save_states(tmp_path / "s")
    schedule.base_lr = 7
    two.load_states(tmp_path / "s")
    assert one.optimizer.lr_scheduler is two.optimizer.lr_scheduler is schedule
    assert one.learning_rate == two.learning_rate == 0.3


SCHEDULES = [factor, multifactor, cosine, chain, lambda: None]


@pytest.mark.filterwarnings("ignore:.* is saved as a pickle")
@pytest.mark.parametrize("saved", SCHEDULES)
@pytest.mark.parametrize("given", SCHEDULES)
def test_of_two_schedules_that_differ_the_saved_one_goes_on_with_a_warning(saved, given, tmp_path):
    def make(schedule, lr):
        params, made = weights([[1.0]], 2), schedule()
        options = {"lr_scheduler": made} if made else {"learning_rate": lr}
        return params, Trainer(params, "sgd", options)

    path, trained = tmp_path / "states", make(saved, 0.1)
    steps(*trained, 5)
    trained[1].save_states(path)
    for keep, goes_on in ((False, make(saved, 0.1)), (True, make(given, 0.2))):
        loaded = make(given, 0.2)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded[1].load_states(path, trusted=saved is chain, keep_schedule=keep)
        assert len(caught) == (saved is not given and not keep), [str(w.message) for w in caught]
        loaded[0][0].set_data(mx.nd.array(steps(*goes_on, 5)))
        assert loaded[1].learning_rate == goes_on[1].learning_rate
        assert steps(*loaded, 3) == steps(*goes_on, 3)


def test_a_kept_schedule_is_called_for_the_updates_that_were_made_and_no_others(tmp_path):
    class Notes(mx.lr_scheduler.LRScheduler):
        def __call__(self, num_update):
            self.numbers = [*getattr(self, "numbers", []), num_update]
            return 0.1

    params, schedule = weights([[1.0]], 2), Notes()
    trainer = Trainer(params, "sgd", {"lr_scheduler": factor()})
    steps(params, trainer, 3)
    trainer.save_states(tmp_path / "states")
    other = Trainer(params, "sgd", {"lr_scheduler": schedule})
    schedule.numbers = []
    other.load_states(tmp_path / "states", keep_schedule=True)
    assert {*schedule.numbers} == {0, 1, 2, 3}
    steps(params, other, 1)
    assert schedule.numbers[-1] == max(schedule.numbers) == 4


def test_a_trainer_that_goes_back_to_its_own_states_has_the_same_schedule(tmp_path):
    params = weights([[1.0]], 2)
    trainer = Trainer(params, "sgd", {"lr_scheduler": factor()})
    steps(params, trainer, 3)
    trainer.save_states(tmp_path / "states")
    steps(params, trainer, 4)
    with warnings.catch_warnings(record=True) as caught:
        trainer.load_states(tmp_path / "states")
    assert not caught


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_training_continues_under_the_numpy_semantics(optimizer, tmp_path):
    with mx.util.np_shape(True), mx.util.np_array(True):
        net, trainer = runs.run(3, optimizer, data=runs.batches()[:2])
        trainer.save_states(tmp_path / "states")
        trainer = Trainer(net.collect_params(), optimizer)
        trainer.load_states(tmp_path / "states")
        runs.train(net, trainer, runs.batches()[2:], contexts(3))
    weight = net[0].weight
    assert {type(array) for array in weight.list_data() + weight.list_grad()} == {mx.np.ndarray}
    assert_as_one(net, runs.stock(optimizer))


def test_float16_states_with_their_float32_copies(tmp_path):
    def trained():
        params = weights([[1.0, 2.0, 3.0]], 2, dtype="float16")
        options = {"learning_rate": 1e-4, "momentum": 0.9, "multi_precision": True}
        return params, Trainer(params, "sgd", options)

    params, trainer = trained()
    steps(params, trainer, 3)
    trainer.save_states(tmp_path / "s")
    again, other = trained()
    again[0].set_data(params[0].data(device(0)))
    other.load_states(tmp_path / "s")
    steps(params, trainer, 5)
    steps(again, other, 5)
    assert runs.bits(params)[:2] == runs.bits(again)[:2]


def assert_refused(trainer, path, words="", trusted=False):
    before = runs.training_state(trainer)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + words):
        trainer.load_states(path, trusted=trusted)
    assert runs.training_state(trainer) == before


def test_states_of_another_optimizer_or_other_parameters_are_refused(tmp_path):
    net, trainer = start("nadam", {})
    runs.train(net, trainer, runs.batches()[:2], contexts(2))
    trainer.save_states(tmp_path / "states")
    for params, optimizer, words in (
        (net.collect_params(), "adam", "Nadam.*Adam"),
        (weights([[1.0]], 2), "nadam", "6 parameters.* 1$"),
        (weights([[1.0]] * 6, 2), "nadam", r"mlp_dense0_weight \[10, 6\].* w0 \[1\]"),
    ):
        assert_refused(Trainer(params, optimizer), tmp_path / "states", words)


@pytest.fixture
def small(tmp_path):
    """A Trainer of one parameter of two elements with momentum, and its file."""
    params = weights([[1.0, 2.0]], 1)
    trainer = Trainer(params, "sgd", {"momentum": 0.5})
    steps(params, trainer, 1)
    path = tmp_path / "small"
    trainer.save_states(path)
    return trainer, path


ATTRIBUTES = ["optimizer", "object", 1]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["format"], 3, "KeyError: 'pickle'"),
        (ATTRIBUTES, {}, "lr_scheduler"),
        ([*ATTRIBUTES, "new"], {"object": ["Popen", {}]}, "TypeError"),
        ([*ATTRIBUTES, "new"], {"constant": "builtin_function_or_method eval"}, "KeyError"),
        (["states"], [[-1, {"nd": 0}]], "not there: .-1"),
        (["states"], [[0, {"object": ["NDArray", {"handle": "ab"}]}]], "TypeError"),
    ],
)
def test_a_header_with_another_value_is_refused_by_name(place, value, words, small):
    trainer, path = small
    set_in_header(path, place, value)
    assert_refused(trainer, path, words)
