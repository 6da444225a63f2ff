"""gluonpar.Trainer trains every operator and every layer of MXNet as gluon.Trainer on one device.

Each operator alone writes the gradients of a Block's Parameters, whatever way it has of doing it:
operators in C++ and of oneDNN, written to and added to, called one by one and from static graphs.
"""

import layer_table
import operator_table
import pytest
import sweep_processes

TABLES = {"operators": operator_table, "layers": layer_table}
pytestmark = pytest.mark.cpu("the sweep compares with MXNet on CPU contexts")


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_every_operator_and_layer_is_trained_as_on_one_device(table):
    """On one device to the bit, on two to rounding."""
    wrong = sweep_processes.sweep(operator_table.keys(table, TABLES[table].RECIPES))
    assert not wrong, "\n".join(f"{' '.join(map(str, key[1:]))}: {wrong[key]}" for key in wrong)
