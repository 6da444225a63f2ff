"""Laws of plans: what check says of a plan is what its executor does, and trace prints it."""

import re

import mxnet as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator import simulate

import gluonpar
from gluonpar.collectives import ALGORITHMS, Hop, check, executor, register, trace
from gluonpar.plans.plan import chunks_sent, contributions, num_chunks, num_steps
from tests.support.contexts import contexts

PLANS = {name: plan for name, plan in ALGORITHMS.items() if plan}


def passes(hops, k):
    try:
        check(hops, k)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", range(1, 10))
def test_every_plan_is_an_allreduce_with_steps_from_0_on(name, k):
    check(PLANS[name], k)
    hops = PLANS[name](k)
    assert {hop.step for hop in hops} == set(range(num_steps(hops)))


@st.composite
def plans(draw):
    """A plan of the package, its devices renamed and its list in any order; often with faults."""
    k = draw(st.integers(2, 8))
    hops = PLANS[draw(st.sampled_from(sorted(PLANS)))](k)
    devices = draw(st.permutations(range(k)))
    hops = [hop._replace(src=devices[hop.src], dst=devices[hop.dst]) for hop in hops]
    for _ in range(draw(st.integers(0, 2))):
        i = draw(st.integers(0, len(hops) - 1))
        field = draw(st.sampled_from(["step", "chunk", "reduce", "devices", "again", "left out"]))
        if field == "devices":
            src, dst = draw(st.permutations(range(k)))[:2]
            hops[i] = hops[i]._replace(src=src, dst=dst)
        elif field == "left out" and len(hops) > 1:
            del hops[i]
        elif field == "again":
            hops.append(hops[i])
        elif field in ("step", "chunk"):
            hops[i] = hops[i]._replace(**{field: draw(st.integers(0, num_steps(hops)))})
        elif field == "reduce":
            hops[i] = hops[i]._replace(reduce=not hops[i].reduce)
    return k, draw(st.permutations(hops))


def conflict(hops):
    """Whether what a step writes depends on the order of its hops."""
    written = {}
    for hop in hops:
        written.setdefault((hop.step, hop.dst, hop.chunk), []).append(hop.reduce)
    return any(len(adds) > 1 and not all(adds) for adds in written.values())


SHIFT = [Hop(0, 0, 1, 0, False), Hop(0, 1, 2, 0, False)]  # the second sends what was there before
TWICE = [Hop(0, 1, 0, 0, True), Hop(1, 0, 1, 0, False), Hop(1, 0, 1, 0, False)]
# Right only if device 2's copy comes before its addition, which are in one step.
MIXED = [Hop(0, 2, 1, 0, True), Hop(1, 0, 2, 0, False), Hop(1, 1, 2, 0, True)]
MIXED += [Hop(2, 2, i, 0, False) for i in (0, 1)]


@given(plans(), st.sampled_from(["float32", "int8"]), st.integers(1, 40))
@example((3, SHIFT), "float32", 3)
@example((3, MIXED), "float32", 3)
@example((2, TWICE), "int8", 3)
@settings(max_examples=200)
def test_executor_and_check_agree_on_every_plan(plan, dtype, size):
    """The executor computes the contributions, also of a wrong plan; check allows sums only."""
    k, hops = plan
    counts = contributions(hops, k)
    assert passes(hops, k) == ((counts == 1).all() and not conflict(hops))
    if conflict(hops):
        return
    values = np.random.RandomState(0).randint(1, 100, (k, size))
    data = [mx.nd.array(value, ctx=c, dtype=dtype) for value, c in zip(values, contexts(k))]
    executor.run(hops, data)
    of_chunks = [part.shape[1] for part in np.array_split(values, num_chunks(hops), axis=1)]
    want = np.einsum("dek,ke->de", np.repeat(counts, of_chunks, axis=1), values).astype(dtype)
    for array, row in zip(data, want):
        np.testing.assert_array_equal(array.asnumpy(), row)


RELAY = [Hop(0, 0, 2, 0, True), Hop(1, 1, 2, 0, True), Hop(2, 2, 1, 0, False)]
RELAY += [Hop(3, 1, 0, 0, False)]  # to device 0 the sum passes device 1, which keeps its own array


@given(plans(), st.integers(0, 7), st.integers(1, 20))
@example((3, RELAY), 0, 3)
def test_a_reduce_and_a_broadcast_along_any_right_plan(plan, root, size):
    k, hops = plan
    if not passes(hops, k):
        return
    algorithm, root = executor.of_plan(lambda k: hops), root % k
    values = np.random.RandomState(0).randint(1, 100, (k, size))
    data = [mx.nd.array(value, ctx=c) for value, c in zip(values, contexts(k))]
    algorithm.reduce([data], root, "sum")
    np.testing.assert_array_equal(data[root].asnumpy(), values.sum(axis=0))
    for i in {*range(k)} - {root}:
        np.testing.assert_array_equal(data[i].asnumpy(), values[i])
    algorithm.broadcast([data], root)
    for array in data:
        np.testing.assert_array_equal(array.asnumpy(), values.sum(axis=0))


def pair(num_devices):
    if num_devices != 2:
        raise ValueError("for two devices")
    return [Hop(0, 0, 1, 0, True), Hop(1, 1, 0, 0, False)]


def forgets_one_of_nine(num_devices):
    return PLANS["star"](num_devices if num_devices < 9 else num_devices - 1)


def test_a_plan_of_ones_own_is_an_algorithm_for_the_devices_that_it_takes():
    data = [mx.nd.ones((2,), c) for c in contexts(3)]
    try:
        register("pair")(pair)
        gluonpar.allreduce(data[:2], "pair")
        assert [array.asnumpy().tolist() for array in data] == [[2, 2], [2, 2], [1, 1]]
        with pytest.raises(ValueError, match="for two devices"):
            gluonpar.allreduce(data, "pair")
    finally:
        del ALGORITHMS["pair"]


def test_a_wrong_plan_is_refused_when_it_is_registered_or_first_used():
    with pytest.raises(ValueError, match="3 devices"):
        register("wrong")(lambda k: PLANS["ring"](2))
    assert "wrong" not in ALGORITHMS
    register("wrong")(forgets_one_of_nine)
    try:
        data = [mx.nd.ones((2,), mx.cpu(i)) for i in range(9)]
        with pytest.raises(ValueError, match="9 devices.*once, got it 0 times"):
            gluonpar.allreduce(data, "wrong")
        assert all((array.asnumpy() == 1).all() for array in data)
    finally:
        del ALGORITHMS["wrong"]


def yields(num_devices):
    yield from PLANS["ring"](num_devices)


NOT_LISTS_OF_HOPS = {
    "yield": yields,
    "None": lambda k: None,
    "a tuple": lambda k: tuple(PLANS["ring"](k)),
    "a function": lambda k: PLANS["ring"],
    "tuples": lambda k: [tuple(hop) for hop in PLANS["ring"](k)],
    "a string": lambda k: [*PLANS["ring"](k), "hop"],
}


@pytest.mark.parametrize("kind", NOT_LISTS_OF_HOPS)
def test_only_a_list_of_hops_is_a_plan(kind):
    """Also where a plan was not refused when it was registered, since it takes 5 devices only."""
    wrong = NOT_LISTS_OF_HOPS[kind]

    def of_five(num_devices):
        if num_devices != 5:
            raise ValueError("for five devices")
        return wrong(num_devices)

    ctx = contexts(5)
    data = [mx.nd.full((3,), i, c) for i, c in enumerate(ctx)]
    net = mx.gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.One(), ctx=ctx)
    for c in ctx:
        with mx.autograd.record():
            loss = net(mx.nd.ones((1, 2), c))
        loss.backward()
    register("five")(of_five)
    try:
        trainer = gluonpar.Trainer(net.collect_params(), "sgd", algorithm="five")
        for call in (
            lambda: register("wrong")(wrong),
            lambda: check(wrong, 3),
            lambda: check(of_five, 5),
            lambda: trace("five", 5),
            lambda: simulate("five", 5, 1e6),
            lambda: gluonpar.allreduce(data, "five"),
            lambda: trainer.step(5),
        ):
            with pytest.raises(TypeError, match="list of Hop"):
                call()
        assert [array.asnumpy().tolist() for array in data] == [[i] * 3 for i in range(5)]
        assert all((w.asnumpy() == 1).all() for w in net.weight.list_data())
    finally:
        del ALGORITHMS["five"]
    assert "wrong" not in ALGORITHMS


@pytest.mark.parametrize("decorator", [register, gluonpar.collectives.register_executor])
def test_a_name_is_registered_once(decorator):
    ring = PLANS["ring"]
    with pytest.raises(ValueError, match="'ring'"):
        decorator("ring")(ring)
    assert ALGORITHMS["ring"] is ring


HOP = re.compile(r"(\d+) -> (\d+): chunks? ([\d, ]+) \((add|copy)\)")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_the_printed_table_is_the_plan(name, k):
    title, *rows, total = str(trace(name, k)).split("\n")
    hops = PLANS[name](k)
    read = [
        Hop(int(row.split()[1]) - 1, int(src), int(dst), int(chunk), kind == "add")
        for row in rows
        for src, dst, chunks, kind in HOP.findall(row)
        for chunk in chunks.split(", ")
    ]
    assert sorted(read) == sorted(hops)
    assert title == f"{name}, {k} device{'s' * (k > 1)}"
    steps, messages, *sent = re.findall(r"[\d/]+", total)
    assert (int(steps), int(messages)) == (len(rows), len(hops)) == (num_steps(hops), len(hops))
    counts, chunks = chunks_sent(hops), num_chunks(hops)
    assert [eval(fraction) for fraction in sent] == [counts[i] / chunks for i in range(k)]
