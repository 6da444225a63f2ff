"""Pictures drawn from real plans, splits and measurements; tools/draw_pictures.py draws them all.

``pictures.step`` has the data-parallel step, ``pictures.timeline`` what ran when, and
``pictures.scaling`` the training benchmark; the hops of an all-reduce are drawn by
:func:`gluonpar.collectives.trace`. Every function returns a matplotlib Figure and writes a file if
it is given a path. ``pictures.paper`` has what they share.
"""
