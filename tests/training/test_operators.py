"""operators: what MXNet's profiler wrote, read and given its part of a step."""

import json

import pytest

from gluonpar.training.timeline import FUSED, Span, classify, events, read


def event(kind, name, ts, pid=0, tid=7):
    return {"name": name, "cat": "operator", "ph": kind, "ts": ts, "pid": pid, "tid": tid}


def file(*found):
    return json.dumps({"traceEvents": list(found), "displayTimeUnit": "ms"}, indent=4)


ONE = (event("B", "relu", 10), event("E", "relu", 15))


def test_a_file_that_begins_with_a_comma_too_many_is_read():
    text = file(*ONE).replace("[", "[\n,\n", 1)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert events(text) == list(ONE)


def test_an_operator_has_its_name_device_thread_and_interval():
    assert read(file(*ONE), {0: 3}, 0, 100) == [Span("relu", 3, 7, 10, 15)]


def test_threads_of_one_device_do_not_mix():
    both = (
        *(event("B", "relu", 10, tid=1), event("B", "exp", 11, tid=2)),
        *(event("E", "relu", 15, tid=1), event("E", "exp", 12, tid=2)),
    )
    assert read(file(*both), {0: 0}, 0, 100) == [
        Span("relu", 0, 1, 10, 15),
        Span("exp", 0, 2, 11, 12),
    ]


def test_other_processes_and_kinds_of_events_are_left_out():
    others = (
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
        {**event("b", "relu", 10, pid=99), "id": 1},
        *(event("B", "relu", 10, pid=1), event("E", "relu", 11, pid=1)),
    )
    assert read(file(*others, *ONE), {0: 0}, 0, 100) == [Span("relu", 0, 7, 10, 15)]


@pytest.mark.parametrize(
    ("window", "intervals"),
    [((10, 15), [(10, 15)]), ((11, 20), []), ((0, 9), []), ((0, 12), [(10, 12)])],
)
def test_only_what_began_in_the_window_counts_and_ends_with_it(window, intervals):
    assert [(s.start, s.end) for s in read(file(*ONE), {0: 0}, *window)] == intervals


def parts(*names, k=2):
    """The parts of operators (name, or (device, name)) that run one after the other."""
    pairs = [name if isinstance(name, tuple) else (0, name) for name in names]
    spans = [Span(name, device, 0, i, i + 1) for i, (device, name) in enumerate(pairs)]
    return [span.part for span in classify(spans, k)]


FORWARD_SEGMENT = "_minus_scalar,_div_scalar,Convolution,relu"
BACKWARD_SEGMENT = "_backward_log,_backward_sum,elemwise_mul,_backward_FullyC"


def test_a_traced_step_with_a_sum_and_an_update_a_device():
    step = ("ImperativeBulk", FORWARD_SEGMENT, BACKWARD_SEGMENT, "transpose,transpose")
    names = (*step, "gluonpar.host", "multi_sgd_update")
    expected = ["forward", "forward", "backward", "backward", "exchange", "update"]
    assert parts(*names) == expected
    assert parts(*names, *names) == expected * 2


def test_a_bulk_is_backward_only_where_nothing_else_shows_backward():
    untraced = ("Convolution", "relu", "ImperativeBulk", "broadcast_sub", "gluonpar.update")
    assert parts(*untraced, "Convolution", k=1) == [
        *("forward", "forward", "backward", "backward", "update", "forward"),
    ]


def test_copies_and_sums_after_backward_are_exchange_and_before_it_are_not():
    names = ("CopyCPU2CPU", "elemwise_add", "_backward_relu", "CopyCPU2CPU", "elemwise_add")
    assert parts(*names, "sgd_update", "CopyCPU2CPU") == [
        *("data", "forward", "backward", "exchange", "exchange", "update", "data"),
    ]


def test_one_device_exchanges_nothing_by_name_of_the_same_update():
    assert parts("_backward_relu", "gluonpar.update", k=1) == ["backward", "update"]


def test_an_update_that_one_device_runs_for_all_is_exchange_too():
    names = ("_backward_relu", (1, "_backward_relu"), "gluonpar.update", (1, "relu"), "relu")
    assert parts(*names) == ["backward", "backward", FUSED, "forward", "forward"]


def test_an_update_on_every_device_is_only_an_update():
    names = ("_backward_relu", (1, "_backward_relu"), "gluonpar.update", (1, "elemwise_add"))
    assert parts(*names, (1, "gluonpar.update")) == [
        *("backward", "backward", "update", "exchange", "update"),
    ]


def test_an_update_after_a_sum_is_only_an_update_even_on_one_device():
    assert parts("_backward_relu", "gluonpar.host", "gluonpar.update")[1:] == ["exchange", "update"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gluonpar", "exchange"),
        ("gluonpar.host", "exchange"),
        ("KVStoreReduce", "exchange"),
        ("gluonpar.runtime.threads", "other"),
        ("DeleteVariable", "other"),
        ("sgd_update", "update"),
        ("multi_mp_sgd_mom_update", "update"),
        ("adam_update", "update"),
        ("lamb_update_phase1", "update"),
        ("_backward_Convolution", "backward"),
        ("update_gate", "forward"),
        ("Convolution", "forward"),
        ("_copyto", "data"),
    ],
)
def test_a_name_on_its_own(name, part):
    assert parts(name) == [part]


def test_operators_come_back_in_the_order_of_their_start():
    spans = [Span("sgd_update", 0, 0, 9, 10), Span("_backward_relu", 0, 0, 1, 2)]
    assert [span.part for span in classify(spans, 2)] == ["backward", "update"]
