"""MXNet 1.9.1 is imported after gluonpar, which gives NumPy the names that it uses."""

import gluonpar  # noqa: F401, I001
import pytest

DTYPES = {"float16", "float64", "mixed", "int8", "uint8", "int32", "int64"}


def pytest_collection_modifyitems(items):
    """Mark as slow the tests of kernels in other dtypes than float32: most kernels are templates.

    Compiling kernels takes longer than all of these tests, and --kernels compiles half as many so.
    """
    for item in items:
        if item.path.name == "test_kernels.py" and hasattr(item, "callspec"):
            values = {value for value in item.callspec.params.values() if isinstance(value, str)}
            if values & DTYPES and "float32" not in values:
                item.add_marker(pytest.mark.slow)
