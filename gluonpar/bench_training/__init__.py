"""One training step measured beside its peers, each in a process of its own.

    contest (in the parent) -> process ==pipe==> worker -> book, gluon, ours or torch_ddp

The worker runs under the name ``bench_training``, not ``gluonpar.bench_training``: importing the
latter would import gluonpar, and MXNet would no longer be as it comes. So the modules that it loads
import each other relatively, and only :mod:`ours` imports gluonpar.
"""
