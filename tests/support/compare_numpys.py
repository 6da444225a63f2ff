"""Run the examples in MXNet's docstrings under two NumPys, and compare what they give.

    .venv/bin/python tests/support/compare_numpys.py record one.json  # NumPy 1
    .venv-numpy2/bin/python tests/support/compare_numpys.py record two.json
    python tests/support/compare_numpys.py compare one.json two.json

Each example's type, dtype, shape and values are recorded, or the exception that it raises; also
the results of the functions that ``mx.np`` takes from NumPy, for arrays of several dtypes. Names
that hold a random or an uninitialised value are listed in RANDOM and left out.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib
import io
import itertools
import json
import pkgutil
import re
import sys
import warnings

SKIPPED = re.compile(r"mxnet\.(tools|libmxnet|onnx\.setup|kvstore_server|kvstore\.kvstore_server)")
RANDOM = re.compile(
    r"random|empty|uniform|normal|shuffle|dropout|sampler|profiler|recordio|wait_to_read|while_loop",
    re.IGNORECASE,
)


def modules(found: dict) -> list:
    """Import all modules of MXNet but those in SKIPPED, and note those that cannot be."""
    import mxnet

    names = (m.name for m in pkgutil.walk_packages(mxnet.__path__, "mxnet.", onerror=print))
    loaded = []

    def load(name):
        loaded.append(importlib.import_module(name))

    for name in names:
        if not SKIPPED.match(name):
            found[f"import {name}"] = attempt(functools.partial(load, name))
    return loaded


def seen(value) -> object:
    """Return a value's type, dtype, shape and elements, so that JSON can hold them."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(seen, value)]
    if isinstance(value, dict):
        return {str(key): seen(one) for key, one in value.items()}
    kind = type(value).__module__ + "." + type(value).__name__
    if kind.startswith("mxnet.symbol"):
        return kind
    if hasattr(value, "asnumpy"):
        value = value.asnumpy()
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return [kind, str(value.dtype), str(value.shape), repr(value.tolist())]
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return [kind, repr(value)]
    return kind


def attempt(work) -> object:
    """Return what ``work`` gives, or the exception that it raises."""
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            value = work()
        # NumPy 2 prints float32 numbers in lists otherwise.
        return [seen(value), re.sub(r" at 0x\w+", "", printed.getvalue())]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"


class Parser(doctest.DocTestParser):
    """Takes what it can of docstrings that are no valid doctests, without a blank after >>>."""

    def _check_prompt_blank(self, *args):
        pass

    def _check_prefix(self, *args):
        pass


def examples(module) -> dict:
    """Run the module's docstrings; return what each expression gave, by docstring and number."""
    import mxnet as mx
    import numpy

    found = {}
    of_np = "numpy" in module.__name__.split(".", 1)[1]
    tests = doctest.DocTestFinder(parser=Parser()).find(module, module.__name__)
    for test in tests:
        names = {"mx": mx, "nd": mx.nd, "np": mx.np if of_np else numpy, "npx": mx.npx}
        names.update(_np=numpy, onp=numpy, gluon=mx.gluon, autograd=mx.autograd, nn=mx.gluon.nn)
        for number, example in enumerate(test.examples):
            if RANDOM.search(test.name) or RANDOM.search(example.source):
                continue

            def work(source=example.source, names=names):
                try:
                    code = compile(source, "<example>", "eval")
                except SyntaxError:
                    exec(compile(source, "<example>", "exec"), names)
                    return None
                return eval(code, names)

            mx.random.seed(0)
            (mx.npx.set_np if of_np else mx.npx.reset_np)()
            found[f"{test.name}:{number}"] = attempt(work)
    return found


def fallbacks() -> dict:
    """Call what ``mx.np`` takes from NumPy on arrays of several dtypes and on Python's numbers."""
    import mxnet as mx
    from mxnet.numpy import fallback

    np, found = mx.np, {}
    dtypes = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64", "bool")
    mx.npx.set_np()
    for dtype, name in itertools.product(dtypes, [*fallback.__all__, *mx.np.__all__]):
        if RANDOM.search(name) or not callable(getattr(np, name, None)):
            continue
        one = np.array([[1, 0, 3], [2, 5, 1], [0, 1, 2]]).astype(dtype)
        row, function = one[0], getattr(np, name)
        calls = {
            "a": (one,), "row": (row,), "a, a": (one, one), "row, row": (row, row),
            "a, 2": (one, 2), "a, 2.5": (one, 2.5), "2, a": (2, one), "a, 300": (one, 300),
            "a, axis": (one, 1), "row, row, row": (row, row, row), "2.5, a": (2.5, one),
        }  # fmt: skip
        for how, args in calls.items():
            found[f"{name}({how}) of {dtype}"] = attempt(lambda f=function, a=args: f(*a))
    mx.npx.reset_np()
    return found


def main() -> int:
    """Record or compare; return the number of differences, at most 1."""
    action, *files = sys.argv[1:]
    warnings.simplefilter("ignore")
    if action == "record":
        import numpy

        import gluonpar  # noqa: F401 - it lets MXNet be imported

        found = {"numpy": numpy.__version__}
        for module in modules(found):
            found.update(examples(module))
        found.update(fallbacks())
        with open(files[0], "w") as file:
            json.dump(found, file, indent=0)
        print(f"NumPy {numpy.__version__}: {len(found)} results")
        return 0
    one, two = (json.load(open(name)) for name in files)
    different = [name for name in one if not equal(one[name], two[name])]
    for name in different:
        print(f"{name}\n    {str(one[name])[:300]}\n    {str(two[name])[:300]}")
    print(f"{len(different)} of {len(one)} differ")
    return int(bool(different))


def equal(one: object, two: object) -> bool:
    """Whether two results are the same; all exceptions are."""
    if isinstance(one, str) and isinstance(two, str):
        return True
    return json.dumps(one).replace("numpy.bool_", "numpy.bool") == json.dumps(two)


if __name__ == "__main__":
    sys.exit(main())
