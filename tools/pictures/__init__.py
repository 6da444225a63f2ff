"""The step, a timeline and the training benchmark as matplotlib pictures, for tools/draw_pictures.py.

Each module's ``draw`` writes one file. :meth:`gluonpar.collectives.Trace.draw` draws the algorithms.
"""
