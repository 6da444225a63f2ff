"""NumPy's former names, and what else MXNet 1.9.1 needs on newer versions of NumPy and Python.

MXNet reads names that NumPy has since removed, some when it is imported and some in its functions,
and it imports ``distutils``. :func:`install` lets MXNet's modules, and no others, import a copy of
the module ``numpy`` with these names. A program's own ``numpy`` stays as it is.
"""

from __future__ import annotations

import builtins
import functools
import importlib.machinery
import operator
import re
import sys
import types
import warnings
from typing import Any, Callable, Sequence


@functools.lru_cache(None)
def install(
    before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    """Let the modules of MXNet that are imported from now on see NumPy's former names.

    Before MXNet is imported ``before`` is called, and then ``after``. NumPy is imported with MXNet.
    """
    sys.meta_path.insert(0, _Finder(before, after))


def _numpy_1() -> types.ModuleType:
    """Return a copy of the module ``numpy`` with all former names that MXNet reads."""
    import numpy as np

    copy = types.ModuleType(np.__name__, np.__doc__)
    vars(copy).update(vars(np), __getattr__=functools.partial(getattr, np))
    # NumPy 1.20 removed these functions, which MXNet only reads; numpy-financial has them.
    financial = ("mirr", "npv", "pmt", "ppmt", "pv", "rate")
    vars(copy).update({name: vars(np).get(name) for name in financial})
    vars(copy).update(
        {"bool": bool, "int": int},  # NumPy 2 has a bool of its own, of which True is no instance
        **{"Inf": np.inf, "PINF": np.inf, "NINF": -np.inf, "NAN": np.nan, "NaN": np.nan},
        **{"PZERO": 0.0, "NZERO": -0.0, "alltrue": np.all, "sometrue": np.any},
        **{"product": np.prod, "round_": np.round, "msort": lambda a: np.sort(a, axis=0)},
        trapz=vars(np).get("trapezoid") or vars(np)["trapz"],
        in1d=lambda *args, **options: np.isin(*args, **options).reshape(-1),
        compat=types.SimpleNamespace(basestring=str),
    )
    return copy


def version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, which compare as distutils's classes do."""
    return tuple(map(int, re.findall(r"\d+", text)))


class _Finder:
    """Finds MXNet's modules as Python does, and lets them import the names they need."""

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self.before, self.after = before, after

    @functools.cached_property
    def builtins(self) -> dict[str, Any]:
        """Python's built-in names, with an ``__import__`` for MXNet's modules."""
        numpy = _numpy_1()
        versions = types.SimpleNamespace(StrictVersion=version, LooseVersion=version)
        replaced = {"numpy": numpy, "distutils.version": versions}

        def import_for_mxnet(
            name: str,
            globals: Any = None,
            locals: Any = None,
            fromlist: Sequence[str] = (),
            level: int = 0,
        ) -> Any:
            if level == 0 and name in replaced:
                return replaced[name]
            imported = builtins.__import__(name, globals, locals, fromlist, level)
            # `import numpy.random` binds `numpy`.
            return numpy if imported is sys.modules["numpy"] else imported

        return {**vars(builtins), "__import__": import_for_mxnet}

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec, if it is one of MXNet's, as the other finders find it."""
        if name.partition(".")[0] != "mxnet":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    loader = spec.loader = _Loader(spec.loader.name, spec.loader.path)
                    loader.finder = self
                return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs a module's code with the built-in names of its ``finder``."""

    finder: _Finder

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code; under NumPy 2 change how it writes attributes and adds metrics."""
        if module.__name__ == "mxnet":
            self.finder.before()
        names = vars(module)
        names["__builtins__"] = self.finder.builtins
        super().exec_module(module)
        if module.__name__ == "mxnet":
            self.finder.after()
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
        """Compile without warnings: Python 3.12 and later warn of ``'\\['``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return super().get_code(fullname)


def _forking(multiprocessing: types.ModuleType) -> types.SimpleNamespace:
    """Return a copy of the module that forks, as Python did by default up to version 3.13.

    MXNet's workers give arrays back as files that only a child of the same process can map.
    """
    fork = multiprocessing.get_context("fork")
    forks = {"Pool": fork.Pool, "Process": fork.Process, "get_context": lambda: fork}
    return types.SimpleNamespace(**{**vars(multiprocessing), **forks})


def _text(value: object) -> str:
    """Return ``str(value)``, in a tuple or list without the types of NumPy's numbers."""
    text = str(value)
    if "np." in text and isinstance(value, (tuple, list)):
        import numpy as np

        legacy: Any = "1.25"  # a value that the types of NumPy 1 do not have
        with np.printoptions(legacy=legacy):
            return str(value)
    return text


class _TextType(type):
    """Makes a class that is :func:`_text` when called, and ``str`` for ``isinstance``."""

    def __call__(cls, value: object) -> str:
        return _text(value)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, str)


# The modules that give operators' attributes, such as shapes, to MXNet's library as text, and what
# ``str`` is there. The first is on the path of every operator.
_WRITE_ATTRIBUTES = {
    "mxnet._ctypes.ndarray": _text,
    "mxnet._ctypes.symbol": _text,
    "mxnet.io.io": _text,
    "mxnet.symbol.symbol": _TextType("str", (), {}),
}


def _sum(name: str) -> property:
    """Return a property that keeps floats as float64 in ``name``, so that sums are in float64."""
    import numpy as np

    def set_sum(metric: object, value: object) -> None:
        setattr(metric, name, np.float64(value) if isinstance(value, float) else value)

    return property(operator.attrgetter(name), set_sum)
