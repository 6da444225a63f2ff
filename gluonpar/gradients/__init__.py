"""Which gradients count: the law, sums and accumulation, and the ages that ranks compare."""

from gluonpar.gradients import passes  # noqa: F401 - from now on it sees backward passes
from gluonpar.gradients.by_hand import follow_copies, of
from gluonpar.gradients.law import discard
from gluonpar.gradients.records import Gradients, of_grads
from gluonpar.gradients.samples import begin_to_count as begin_to_count_samples
from gluonpar.gradients.samples import tell as tell_samples
from gluonpar.gradients.static_graphs import adopt, track
from gluonpar.gradients.sums import (
    are_sums,
    check_summed,
    mark_exchanged,
    mark_summed,
    mark_used,
    summands,
    summed,
)

__all__ = ["Gradients", "adopt", "are_sums", "begin_to_count_samples", "check_summed", "discard"]
__all__ += ["follow_copies", "mark_exchanged", "mark_summed", "mark_used", "of", "of_grads"]
__all__ += ["summands", "summed", "tell_samples", "track"]
