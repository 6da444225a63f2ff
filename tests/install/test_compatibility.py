"""MXNet works as with NumPy 1 and Python 3.8, and a program's own NumPy stays as it is."""

import ctypes
import inspect

import mxnet as mx
import numpy as np
import pytest
from mxnet.base import _LIB, check_call
from mxnet.gluon.contrib import estimator  # noqa: F401 - imported after MXNet, and reads np.Inf

from tests.support.processes import end_python, run_fork, run_python

SUMS = ["Loss", "MAE", "MSE", "RMSE", "CrossEntropy", "NegativeLogLikelihood"]


@pytest.mark.parametrize("name", SUMS)
def test_a_metric_adds_float32_numbers_in_float64(name):
    metric = mx.metric.create(name)
    labels, preds = mx.nd.array([0, 1]), mx.nd.array([[0.3, 0.7], [0.4, 0.6]])
    if name.startswith(("M", "R")):
        preds = preds[:, 0]
    metric.update([labels], [preds])
    once = metric.sum_metric
    assert np.float32(once) == once != 0
    metric.sum_metric += 2.0**30
    assert metric.sum_metric == 2**30 + float(once) and metric.sum_metric.dtype == "float64"
    metric.reset()
    assert metric.sum_metric == 0


TWO = np.int64(2)
AS_WITH_NUMPY_1 = {
    "bool": lambda: mx.np.bool is bool,
    "zeros": lambda: mx.nd.zeros((TWO, TWO)).shape == (2, 2),
    "zeros of a list": lambda: mx.nd.zeros([TWO, TWO]).shape == (2, 2),
    "reshape": lambda: mx.nd.ones(4).reshape((TWO, TWO)).shape == (2, 2),
    "tile": lambda: mx.nd.tile(mx.nd.ones(2), reps=(TWO,)).shape == (4,),
    "split_v2": lambda: len(mx.nd.split_v2(mx.nd.ones(4), (TWO,))) == 2,
    "Variable": lambda: mx.sym.var("x", shape=(TWO,)).infer_shape()[0] == [(2,)],
    "Symbol": lambda: mx.sym.zeros((TWO, TWO)).infer_shape()[1] == [(2, 2)],
}


@pytest.mark.parametrize("what", AS_WITH_NUMPY_1)
def test_a_shape_may_be_of_numpys_integers_and_mxnets_bool_is_pythons(what):
    assert AS_WITH_NUMPY_1[what]()


OF_NUMPY_1 = {
    "alltrue": (lambda f, a: f(a), False, "bool"),
    "sometrue": (lambda f, a: f(a), True, "bool"),
    "product": (lambda f, a: f(a + 1), 24, "float32"),
    "round_": (lambda f, a: f(a / 4, 1), [[0.0, 0.8], [0.2, 0.5]], "float32"),
    "in1d": (lambda f, a: f(a, a[0]), [True, True, False, False], "bool"),
    "row_stack": (lambda f, a: f((a, a)), [[0, 3], [1, 2]] * 2, "float32"),
    "msort": (lambda f, a: f(a), [[0, 2], [1, 3]], "float32"),
    "trapz": (lambda f, a: f(a), [1.5, 1.5], "float32"),
    "trapz of a row": (lambda f, a: f(a[0], dx=2), 3, "float32"),
}


@pytest.mark.parametrize("name", OF_NUMPY_1)
def test_functions_that_numpy_2_renamed_give_what_they_gave(name):
    call, value, dtype = OF_NUMPY_1[name]
    a = mx.np.array([[0, 3], [1, 2]], dtype="float32")
    with mx.util.np_shape(True), mx.util.np_array(True):
        got = call(getattr(mx.np, name.split()[0]), a)
        assert np.allclose(np.array(got.tolist()), value) and got.dtype == dtype


def test_a_data_loader_of_processes_gives_its_batches():
    """Also where Python's default is to start processes without a fork, since 3.14.

    In a new process: pytest's may have more addresses in a region than Linux forks.
    """
    program = (
        "import gluonpar, mxnet as mx, numpy as np\n"
        "data = mx.gluon.data.ArrayDataset(np.arange(6, dtype='float32'), np.arange(6))\n"
        "loader = mx.gluon.data.DataLoader(data, batch_size=4, num_workers=2, timeout=60)\n"
        "print([x.asnumpy().tolist() for x, _ in loader])"
    )
    assert run_python(program) == "[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0]]\n"


@pytest.mark.slow
def test_a_programs_numpy_stays_as_it_is_and_no_warning_is_shown(tmp_path):
    """Also where MXNet is compiled anew, as it is if its folder cannot be written to."""
    program = (
        "import inspect, numpy, numpy.testing\n"
        "def names(): return {k: v for k, v in vars(numpy).items() if not inspect.ismodule(v)}\n"
        "before = names()\n"
        "import gluonpar, mxnet.gluon.contrib.estimator\n"
        "assert names() == before"
    )
    done = end_python(program, PYTHONWARNINGS="error", PYTHONPYCACHEPREFIX=str(tmp_path))
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.parametrize("kind", ["ndarray", "symbol"])
def test_a_function_of_an_operator_is_the_one_that_mxnet_wrote(kind):
    """Its signature and docstring before the first call, and its code after a call."""
    module, num_called = getattr(mx, kind), 0
    write = getattr(module.register, f"_generate_{kind}_function_code")
    for name, ours in {**vars(module.op), **vars(module._internal)}.items():
        if not inspect.isfunction(ours) or ours.__code__.co_filename != "<string>":
            continue
        handle, local = ctypes.c_void_p(), {}
        check_call(_LIB.NNGetOpHandle(name.encode(), ctypes.byref(handle)))
        source, docstring = write(handle, name, name)
        exec(source, vars(module.register), local)
        signature = inspect.signature(ours)
        assert signature == inspect.signature(local[name]) and ours.__doc__ == docstring
        first = next(iter(signature.parameters.values()))
        if first.kind == first.VAR_POSITIONAL or first.name in ("data", "lhs"):  # it takes arrays
            with pytest.raises(AssertionError):
                ours("no array")
            code, want = ours.__code__, local[name].__code__
            assert (code.co_code, code.co_consts) == (want.co_code, want.co_consts)
            num_called += 1
    assert num_called > 200


def test_the_first_call_of_a_function_has_all_its_arguments():
    """Listed ones, named ones, and ones that only its ``**kwargs`` take."""
    program = (
        "import mxnet as mx\n"
        "x, a, b = mx.nd.ones((2, 3)), mx.sym.var('a'), mx.sym.var('b')\n"
        "print(mx.nd.concat(x, x, dim=0).shape, mx.nd.sum(x, 1, keepdims=True).shape)\n"
        "print(mx.sym.concat(a, b, dim=0, name='c').name, mx.sym.dot(a, rhs=b).list_arguments())"
    )
    assert run_fork(program) == "(4, 3) (2, 1)\nc ['a', 'b']\n"
