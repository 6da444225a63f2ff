"""What tests/gpu_sim does with tools/cuda_sim: count a call's operations, run a program."""

import cuda_sim
import mxnet as mx

from tests.support.processes import run_python


def counted(function):
    """How often each operation happened while ``function`` ran, by its name."""
    mx.nd.waitall()
    cuda_sim.reset()
    function()
    mx.nd.waitall()
    return {name: count.times for name, count in cuda_sim.counters().items() if count.times}


def run(program, *arguments, num_gpus=2, variables=None, **options):
    """Run a program's text on simulated GPUs with ``options``; return what it prints.

    It can import tests.support.
    """
    simulated = cuda_sim.environment(num_gpus, **options)
    return run_python(program, *arguments, **{**simulated, **(variables or {})})
