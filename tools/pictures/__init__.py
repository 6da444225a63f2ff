"""Pictures for tools/draw_pictures.py: the step and the training benchmark.

``draw`` of each module writes one file. tools/drawing.py draws plans.
"""
