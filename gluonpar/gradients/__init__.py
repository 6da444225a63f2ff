"""Which gradients count: the law, sums and accumulation, and the ages that ranks compare."""

from gluonpar.gradients.law import discard
from gluonpar.gradients.passes import follow_copies, track
from gluonpar.gradients.records import Gradients, of, of_grads
from gluonpar.gradients.static_graphs import separate
from gluonpar.gradients.sums import (
    are_sums,
    check_summed,
    mark_exchanged,
    mark_summed,
    mark_used,
    summands,
)

__all__ = ["Gradients", "are_sums", "check_summed", "discard", "follow_copies", "mark_exchanged"]
__all__ += ["mark_summed", "mark_used", "of", "of_grads", "separate", "summands", "track"]
