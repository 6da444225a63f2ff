"""Programs of any order: K devices train as one (tests/support/any_program.py)."""

import pytest
from any_program import EVERY, check, law
from gluon_runs import STATIC


@pytest.mark.parametrize("kvstore, optimizer, sparse", EVERY)
def test_k_devices_train_as_one(kvstore, optimizer, sparse):
    law(kvstore, optimizer, sparse, num_programs=40)()


@pytest.mark.slow
@pytest.mark.parametrize("kvstore, optimizer, sparse", EVERY)
def test_k_devices_train_as_one_in_many_programs(kvstore, optimizer, sparse):
    law(kvstore, optimizer, sparse, num_programs=100)()


def test_a_graph_with_static_memory_beside_another_after_a_move():
    """It writes to the gradients from before the move, when the other one's have been seen."""
    both, other = [(2, model, "one backward", 1) for model in (0, 2)]
    program = [("hybridize", (STATIC,)), ("backward", both), ("move", (2, False))]
    program += [("train", (0, *other)), ("train", (0, *both)), ("accumulate", (0, both, other))]
    check(None, "sgd", False, 2, program)
