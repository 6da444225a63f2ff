"""gluonpar.Trainer trains every operator and every layer of MXNet as gluon.Trainer on one device.

Each operator alone writes the gradients of a Block's Parameters, whatever way it has of doing it:
operators in C++ and of oneDNN, written to and added to, called one by one and from static graphs.
"""

import re

import layer_table
import operator_table
import pytest
import sweep_processes

TABLES = {"operators": operator_table, "layers": layer_table}
pytestmark = pytest.mark.cpu("the sweep compares with MXNet on CPU contexts")


def test_every_operator_and_layer_has_a_row():
    """Operators are trained, or excluded for a reason; their backward is run by them, see below."""
    forward = {name for name in operator_table.OPERATORS if "backward" not in name}
    assert forward - operator_table.EXCLUDED == {*operator_table.RECIPES}
    for pattern in operator_table.PATTERNS:
        assert any(re.fullmatch(pattern, name) for name in operator_table.EXCLUDED), pattern
    assert layer_table.classes() == {*layer_table.RECIPES} ^ {*layer_table.EXCLUDED}


@pytest.mark.slow
def test_every_backward_operator_is_run():
    """By the profiler of MXNet."""
    keys = [
        key
        for name, table in TABLES.items()
        for key in operator_table.keys(name, table.RECIPES)
        if key[-2:] == ("imperative", "write")
    ]
    backward = {name for name in operator_table.OPERATORS if "backward" in name}
    excluded = {name for name in operator_table.EXCLUDED if "backward" in name}
    assert backward - sweep_processes.executed(keys) == excluded


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_operator_and_layer_is_trained_as_on_one_device(table):
    """On one device to the bit, on two to rounding."""
    wrong = sweep_processes.sweep(operator_table.keys(table, TABLES[table].RECIPES))
    assert not wrong, "\n".join(f"{' '.join(map(str, key[1:]))}: {wrong[key]}" for key in wrong)
