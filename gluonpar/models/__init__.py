"""Models and losses: plain functions of arrays, and Gluon networks."""

from gluonpar.models.losses import softmax_cross_entropy

__all__ = ["softmax_cross_entropy"]
