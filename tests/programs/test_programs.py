"""Others' programs train with gluonpar as with MXNet's Trainer; each in a process of its own."""

import subprocess

import compare
import pytest


@pytest.mark.parametrize("name", compare.ALIKE)
def test_a_program_trains_as_with_gluon_trainer(name):
    """On two devices to the bit; on four, where sums may be added in another order, for one step.

    Longer than that, rounding can grow: which boxes are proposed, say, depends on it.
    """
    found = compare.child(name, 2, 4)
    assert len(found) == 2
    for line in found:
        assert line["replicas agree"] and line["finite"], line
        if line["k"] == 2:
            assert line["same bits"], line
        else:
            assert line["after one step"] < 1e-5, line


def test_synchronised_devices_are_as_one_device():
    """In float64; in float32 rounding grows, through 50 layers, to a fifth of a gradient."""
    [line] = compare.child("fcn_as_one", 2)
    assert line["replicas agree"] and line["after one step"] < 1e-9, line


def test_mxnets_own_synchronised_batch_norm_trains_the_same():
    try:
        [line] = compare.child("ssd_contrib", 2, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("MXNet's SyncBatchNorm stood still, as it can on CPU contexts")
    assert line["same bits"] and line["replicas agree"], line
