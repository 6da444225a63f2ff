"""One training step of gluonpar beside other libraries' steps.

``candidates`` has what is measured, ``tables`` what is shown. Each library has a module with a
function ``make`` that returns a :class:`training.Training`.
"""
