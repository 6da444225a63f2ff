"""What the ranks report of themselves, and whether one of them has to be given up. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Report:
    """What a rank says of itself each second.

    ``operation`` counts the collectives it has begun, ``what`` describes the last one,
    ``waiting_seconds`` is how long it has been in it (None: it is in none), and ``at`` is where its
    main thread is in the program.
    """

    operation: int = 0
    what: str = ""
    waiting_seconds: float | None = None
    at: str = ""


class Judge:
    """Who of ``size`` ranks lives, who waits for whom, and when that is too long.

    ``now`` is everywhere a time in seconds, of any one clock. ``timeout_seconds`` is how long a
    rank may be silent, or be waited for.
    """

    def __init__(self, size: int, timeout_seconds: float, now: float) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self.names = {rank: f"rank {rank}" for rank in range(size)}
        self.gone: set[int] = set()
        self._reports = {rank: Report() for rank in range(size)}
        self._heard = dict.fromkeys(range(size), now)
        self._cause: str | None = None

    def hello(self, rank: int, host: str, pid: int, now: float) -> None:
        """The rank is there; its name in messages."""
        self.names[rank] = f"rank {rank} (pid {pid} on {host})"
        self._heard[rank] = now

    def report(self, rank: int, report: Report, now: float) -> None:
        """The rank lives, and says where it is."""
        self._reports[rank], self._heard[rank] = report, now

    def failed(self, rank: int, why: str) -> None:
        """The rank says that it ends, and why."""
        self.blame(f"{self.names[rank]} {why}")

    def blame(self, cause: str) -> None:
        """The job must end because of this."""
        self._cause = self._cause or cause  # the first is the cause of the others

    def lost(self, rank: int) -> None:
        """The rank's connection is gone; that of one that has said goodbye may go."""
        if rank not in self.gone:
            self.blame(
                f"{self.names[rank]} died without a word: killed (kill -9, out of memory) or "
                "crashed"
            )

    def left(self, rank: int) -> None:
        """The rank has come to the end of its program."""
        self.gone.add(rank)

    @property
    def all_left(self) -> bool:
        """Whether all ranks have come to the end of their programs."""
        return len(self.gone) == self.size

    def verdict(self, now: float) -> str | None:
        """Why the job must end, naming the rank; None if it need not."""
        return self._cause or self._silent(now) or self._missing() or self._stuck()

    def silent(self, seconds: float, now: float) -> str:
        """For a message: which ranks have not been heard for so long, if any."""
        for rank, heard in self._heard.items():
            if rank not in self.gone and now - heard > seconds:
                return f"{self.names[rank]} has been silent for {now - heard:.0f} s"
        return ""

    def _silent(self, now: float) -> str | None:
        words = self.silent(self.timeout_seconds, now)
        return f"{words}: stopped, or its machine or the network is down" if words else None

    def _missing(self) -> str | None:
        """A rank that others wait for has not come, or cannot come any more."""
        for waiter, report in self._reports.items():
            if report.waiting_seconds is None:
                continue
            late = [r for r in self._reports if self._reports[r].operation < report.operation]
            for rank in late:
                waits = f"operation {report.operation} ({report.what}), where rank {waiter} waits"
                if rank in self.gone:
                    return f"{self.names[rank]} has ended before {waits}"
                if report.waiting_seconds > self.timeout_seconds:
                    at = self._reports[rank].at
                    return (
                        f"{self.names[rank]} hangs: it has not come in "
                        f"{report.waiting_seconds:.0f} s to {waits}"
                        + (f"; its program is at {at}" if at else "")
                    )
        return None

    def _stuck(self) -> str | None:
        """All have come, and yet it does not end."""
        for rank, report in self._reports.items():
            if (report.waiting_seconds or 0) <= self.timeout_seconds:
                continue
            same = {r: o for r, o in self._reports.items() if o.operation == report.operation}
            whats = "; ".join(f"rank {r}: {o.what}" for r, o in same.items())
            return (
                f"{self.names[rank]} has been in operation {report.operation} for "
                f"{report.waiting_seconds:.0f} s ({whats}). The network is down, or ranks do "
                "different things: GLUONPAR_CHECK=1 tells"
            )
        return None
