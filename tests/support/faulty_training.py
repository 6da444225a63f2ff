"""A training in which operators fail, for test_faults.py: ``faulty_training.py MODEL [OPTION]``."""

import faulthandler
import sys
import threading

from gluonpar.runtime import engine
from gluonpar.training import command_line, workloads

import mxnet as mx  # isort: skip

WATCHDOG_SECONDS = 500  # then all threads' stacks are printed, and the process ends with 1
CTX = [mx.cpu(0), mx.cpu(1)]
ARGUMENTS = "--dataset synthetic --device cpu --num-gpus 2 --limit 64 --batch-size 16 --epochs 2"


class Planted(Exception):
    """What the operators fail with."""


def fail(*_):
    raise Planted("the planted error")


def main(model, *more):
    """In the third step an operator of the engine raises, which was to write a parameter.

    Another one, on a device of its own, raises when the process is about to end.
    """
    told, array, show = threading.Event(), mx.nd.zeros((1,), ctx=mx.cpu(2)), sys.excepthook

    def hook(*error):
        show(*error)
        told.set()

    sys.excepthook = hook

    class Faulty(workloads.WORKLOADS[model]):
        steps = 0

        def step(self, *batch):
            self.steps += 1
            if self.steps == 3:
                engine.push(lambda: told.wait() and fail(), mx.cpu(2), writes=[array])
                engine.push(fail, CTX[0], writes=[self.copies[0][0]])
            return super().step(*batch)

    workloads.WORKLOADS[model] = Faulty
    sys.exit(command_line.main([*ARGUMENTS.split(), "--model", model, *more]))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True)
    main(*sys.argv[1:])
