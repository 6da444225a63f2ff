"""Messages between ranks in any order. Collectives have one order, the same on all ranks."""

from __future__ import annotations

import collections
import sys
import threading
import time
from typing import Any, Callable

# The time between two looks for messages: while one is expected or being sent, and otherwise.
_POLL_SECONDS, _IDLE_SECONDS = 50e-6, 0.5


class Messages:
    """Sends picklable objects to other ranks, and calls a function with each one received.

    One thread does both, the only one that uses ``comm``. It holds ``mpi_lock`` while it calls MPI.
    """

    def __init__(self, mpi: Any, comm: Any, mpi_lock: threading.Lock) -> None:
        self.size = comm.size
        self._mpi, self._comm, self._mpi_lock = mpi, comm, mpi_lock
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._to_send: collections.deque[bytes] = collections.deque()
        self._sent: list[tuple] = []  # requests, and the bytes that they send
        self._wake, self._closed = threading.Event(), False
        self._handle: Callable[[int, Any], None] = lambda rank, message: None
        self._is_expected: Callable[[], bool] = lambda: False
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gluonpar.messages", daemon=True)
        self._thread.start()  # now, because a process that is ending cannot start threads

    def start(self, handle: Callable[[int, Any], None], is_expected: Callable[[], bool]) -> None:
        """From now on call ``handle(rank, message)`` with messages, on the thread, without a lock.

        ``is_expected()`` returns whether a message is expected. Only the first call has an effect.
        """
        if not self._begun.is_set():
            self._handle, self._is_expected = handle, is_expected
            self._begun.set()

    def send(self, message: Any) -> None:
        """Send ``message`` to all other ranks; return before it is sent."""
        self._to_send.append(self._mpi.pickle.dumps(message))
        self.look()

    def look(self) -> None:
        """Wake the thread, because a message is expected now."""
        self._wake.set()

    def close(self, barrier: Callable[[], Any]) -> None:
        """Send all messages, and receive others until ``barrier()``, which waits for all ranks."""
        self.start(self._handle, self._is_expected)
        self._is_expected = lambda: not self._closed
        self.look()
        while self._to_send or self._sent:
            time.sleep(_POLL_SECONDS)
        barrier()
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._begun.wait()
            while not self._closed:
                self._wake.wait(_IDLE_SECONDS)
                self._wake.clear()
                while self._exchange() or self._is_expected():
                    time.sleep(_POLL_SECONDS)
        except BaseException:
            sys.excepthook(*sys.exc_info())  # ends the job: see FailureDetector

    def _exchange(self) -> bool:
        """Send and receive messages; return whether any is still to be sent."""
        byte, status, received = self._mpi.BYTE, self._mpi.Status(), []
        with self._mpi_lock:
            while self._to_send:
                sent = self._to_send[0]
                self._sent += [(self._comm.Isend([sent, byte], i), sent) for i in self._others]
                self._to_send.popleft()
            while (message := self._comm.Improbe(status=status)) is not None:
                data = bytearray(status.Get_count(byte))
                message.Recv([data, byte])
                received.append((status.source, data))
            self._sent = [each for each in self._sent if not each[0].Test()]
        for rank, data in received:
            self._handle(rank, self._mpi.pickle.loads(data))
        return bool(self._to_send or self._sent)
