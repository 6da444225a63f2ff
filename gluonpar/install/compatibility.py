"""What MXNet 1.9.1 needs on newer versions of NumPy and Python.

:func:`install` changes how MXNet's modules, and no others, are imported. An example of each repair:

- MXNet reads ``numpy.bool``, which NumPy 1.24 removed: its modules import a copy of ``numpy`` that
  has the former names (``_numpy_1``). The program's own ``numpy`` stays as it is.
- MXNet imports ``distutils.version``, which Python 3.12 removed: versions are tuples of numbers.
- ``mx.nd.zeros((np.int64(2),))`` passes the shape as text, under NumPy 2 as "(np.int64(2),)", which
  MXNet's library cannot read: ``str`` is :func:`_text` in the modules that write such text.
- A metric's sum that begins as 0.0 becomes float32 under NumPy 2 if ``np.float32`` is added to it,
  and loses digits: it is kept as ``np.float64`` (``_sum``).
- Python 3.14 does not fork a DataLoader's workers, but MXNet's workers give arrays back as files
  that only a child of the same process can map (``_forking``).
- Python 3.12 warns of ``'\\['`` in MXNet's source: it is compiled without warnings.

The import of MXNet also takes a quarter less time than alone: MXNet writes a Python function for
each of 2,600 operators and compiles it; here the first call of a function does that (``_define``).
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import inspect
import operator
import re
import sys
import types
import warnings
from typing import Any, Callable


@functools.lru_cache(None)
def install(
    before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    """Make MXNet's modules importable that are imported from now on.

    ``before`` is called before MXNet is imported, and ``after`` afterwards. Imports no NumPy.
    """
    _Loader.before, _Loader.after = staticmethod(before), staticmethod(after)
    sys.meta_path.insert(0, _Finder)


def _numpy_1() -> types.ModuleType:
    """Return a copy of the module ``numpy`` with all former names that MXNet reads."""
    import numpy as np

    copy = types.ModuleType(np.__name__, np.__doc__)
    vars(copy).update(vars(np), __getattr__=functools.partial(getattr, np))
    # NumPy 1.20 removed these functions, which MXNet reads and never calls.
    financial = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")
    vars(copy).update({name: vars(np).get(name) for name in financial})
    vars(copy).update(
        {"bool": bool, "int": int},  # True is no instance of NumPy 2's own bool
        **{"Inf": np.inf, "PINF": np.inf, "NINF": -np.inf, "NAN": np.nan, "NaN": np.nan},
        **{"PZERO": 0.0, "NZERO": -0.0, "alltrue": np.all, "sometrue": np.any},
        **{"product": np.prod, "round_": np.round, "msort": lambda a: np.sort(a, axis=0)},
        trapz=vars(np).get("trapezoid") or vars(np)["trapz"],
        in1d=lambda *args, **options: np.isin(*args, **options).reshape(-1),
        compat=types.SimpleNamespace(basestring=str),
    )
    return copy


def version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, which compare as distutils' classes do."""
    return tuple(map(int, re.findall(r"\d+", text)))


@functools.lru_cache(None)
def _builtins() -> dict[str, Any]:
    """Return Python's built-in names, with an ``__import__`` for MXNet's modules."""
    numpy = _numpy_1()
    versions = types.SimpleNamespace(StrictVersion=version, LooseVersion=version)
    replaced = {"numpy": numpy, "distutils.version": versions}

    def import_for_mxnet(name: str, globals: Any, locals: Any, fromlist: Any, level: int) -> Any:
        if level == 0 and name in replaced:
            return replaced[name]
        imported = builtins.__import__(name, globals, locals, fromlist, level)
        # `import numpy.random` returns `numpy`.
        return numpy if imported is sys.modules["numpy"] else imported

    return {**vars(builtins), "__import__": import_for_mxnet}


class _Finder:
    """Finds MXNet's modules as Python does, and has :class:`_Loader` load them."""

    @staticmethod
    def find_spec(name: str, *where: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "mxnet":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, *where)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module's code with :func:`_builtins`, and repairs what the code has defined."""

    before: Callable[[], None]
    after: Callable[[], None]

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "mxnet":
            self.before()
        names = vars(module)
        names["__builtins__"] = _builtins()
        if module.__name__ in _WRITE_FUNCTIONS:
            later = {"exec": functools.partial(_define, names), "_first_call": _first_call}
            names["__builtins__"] = {**_builtins(), **later}
        super().exec_module(module)
        if module.__name__ == "mxnet":
            self.after()
        if module.__name__ == "mxnet.gluon.data.dataloader" and sys.version_info >= (3, 14):
            names["multiprocessing"] = _forking(names["multiprocessing"])
        if version(sys.modules["numpy"].__version__) < (2,):
            return
        if module.__name__ in _WRITE_ATTRIBUTES:
            names["str"] = _WRITE_ATTRIBUTES[module.__name__]
        elif module.__name__ == "mxnet.metric":
            for name in ("sum_metric", "global_sum_metric"):
                setattr(names["EvalMetric"], name, _sum(f"_{name}"))

    def get_code(self, fullname: str) -> types.CodeType | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().get_code(fullname)


# MXNet's modules that write functions of operators, and compile them by ``exec``.
_WRITE_FUNCTIONS = {"mxnet.ndarray.register", "mxnet.symbol.register"}
_functions: list[tuple[types.FunctionType, str]] = []  # with their sources


def _define(names: dict[str, Any], source: str, _: None, local: dict[str, Any]) -> None:
    """Do what ``exec(source, names, local)`` does; the function's first call compiles its body."""
    signature = source.partition("):")[0]
    body = f"return _first_call({len(_functions)}, locals())"
    exec(f"{signature}): {body}", names, local)  # noqa: S102 - MXNet's own source
    _functions.extend((function, source) for function in local.values())


def _first_call(number: int, given: dict[str, Any]) -> Any:
    """Compile a function's body, and call the function with its arguments, ``given`` by name."""
    function, source = _functions[number]
    local: dict[str, Any] = {}
    exec(source, function.__globals__, local)  # noqa: S102
    [whole] = local.values()
    function.__code__ = code = whole.__code__
    takes_list = code.co_flags & inspect.CO_VARARGS
    arrays = given.pop(code.co_varnames[code.co_argcount]) if takes_list else ()
    return function(*arrays, **given.pop("kwargs"), **given)


def _forking(multiprocessing: types.ModuleType) -> types.SimpleNamespace:
    """Return a copy of the module that forks, as Python did by default up to version 3.13."""
    fork = multiprocessing.get_context("fork")
    forks = {"Pool": fork.Pool, "Process": fork.Process, "get_context": lambda: fork}
    return types.SimpleNamespace(**{**vars(multiprocessing), **forks})


def _text(value: object) -> str:
    """Return ``str(value)``, without the types of NumPy's numbers in a tuple or list."""
    text = str(value)
    if "np." in text and isinstance(value, (tuple, list)):
        import numpy as np

        legacy: Any = "1.25"  # NumPy 1's types do not know this value
        with np.printoptions(legacy=legacy):
            return str(value)
    return text


class _TextType(type):
    """Makes a class that is :func:`_text` when called, and ``str`` for ``isinstance``."""

    def __call__(cls, value: object) -> str:
        return _text(value)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


# The modules that pass operators' attributes, such as shapes, to MXNet's library as text, and what
# ``str`` is there. Every operator calls the first; the last also calls ``isinstance(value, str)``.
_WRITE_ATTRIBUTES = {
    "mxnet._ctypes.ndarray": _text,
    "mxnet._ctypes.symbol": _text,
    "mxnet.io.io": _text,
    "mxnet.symbol.symbol": _TextType("str", (), {}),
}


def _sum(name: str) -> property:
    """Return a property that keeps floats as float64 in the attribute ``name``."""
    import numpy as np

    def set_sum(metric: object, value: object) -> None:
        setattr(metric, name, np.float64(value) if isinstance(value, float) else value)

    return property(operator.attrgetter(name), set_sum)
