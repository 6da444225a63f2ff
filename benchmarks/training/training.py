"""What a worker asks of a candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class Training:
    """A training under way: steps on the whole batch, and what came of them."""

    other_bytes = 0  # peak memory of processes other than this one

    def step(self) -> None:
        """One step; it need not wait."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when all that the steps started is done."""
        raise NotImplementedError

    def loss(self) -> float:
        """Mean loss over the batch with the parameters there are now, of every device its shard.

        As in a step, batch normalisation takes the shard's own statistics. Nothing is changed.
        """
        raise NotImplementedError

    def run(self, steps: int) -> None:
        """So many steps, from the first's start to the last's end."""
        for _ in range(steps):
            self.step()
        self.wait()

    def values(self) -> list[list[np.ndarray]]:
        """The trained parameters' values, a list a device; empty if they are in other processes."""
        return []

    def memory(self) -> list[dict[str, int]]:
        """Per device, bytes of the arrays that stay between steps; empty if they are not counted.

        Keys: "parameters", "gradients" and "others".
        """
        return []
