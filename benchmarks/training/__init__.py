"""One training step of gluonpar beside other libraries' steps.

``candidates`` has what is measured, ``soak`` the check of a long run, ``tables`` and ``soak_chart``
what is shown. The candidates' modules are ``train_batch``, ``book``, ``gluon``, ``torch_ddp`` and
``horovod_gluon``; each has a function ``make`` that returns a :class:`training.Training`.
"""
