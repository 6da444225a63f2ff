"""gluonpar.Trainer trains an operator of each kind as gluon.Trainer does on one device.

tools/operator_sweep.py trains all of them.
"""

import operator_sweep
import pytest

from tests.support.processes import end

# In C++ and of oneDNN, of several graphs, in Python, and one whose backward is differentiated.
# Backward of Deconvolution cannot write into views. MXNet adds wrongly to the gradient of clip.
KINDS = "sin clip Convolution Deconvolution _foreach _cond Custom _CustomFunction FullyConnected"


@pytest.mark.slow
@pytest.mark.cpu("the sweep compares with MXNet on CPU contexts")
def test_an_operator_of_each_kind_is_trained_as_on_one_device():
    done = end(operator_sweep.__file__, *KINDS.split())
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 40
