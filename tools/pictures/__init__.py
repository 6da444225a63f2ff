"""Pictures for tools/draw_pictures.py: the step and the training benchmark.

``draw`` of each module writes one file. notebooks/drawing.py draws plans.
"""
