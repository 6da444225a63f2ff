"""One training step measured beside its peers, each in a process of its own.

    candidates -> contest (in the parent) -> process ==pipe==> worker -> a candidate's module

``soak``, ``steady``, ``tables``, ``chart`` and ``panels`` are the parent's, too; the candidates'
modules are ``book``, ``gluon``, ``ours``, ``torch_ddp`` and ``horovod_gluon``.

The worker runs under the name ``bench_training``, not ``benchmarks.training``: importing the
latter would import gluonpar, and MXNet would no longer be as it comes. So the modules that it loads
import each other relatively, and only :mod:`ours` and :mod:`held` import gluonpar.
"""
