"""The watch: a thread a rank that ends the whole job when one of the ranks cannot go on.

MPI itself waits for ever for a rank that does not come. So each rank has a thread with a TCP
connection to rank 0's, over which both say each second that they live and where they are. Rank 0's
thread judges (:mod:`gluonpar.cluster.judge`); if there is a verdict, it prints that line and tells
everybody to end. If rank 0 itself is lost, the others notice, and the lowest of them prints.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from gluonpar.cluster import ending, wire
from gluonpar.cluster.judge import Judge, Report

BEAT_SECONDS = 1.0
FAILED, INTERRUPTED, TERMINATED = 1, 128 + signal.SIGINT, 128 + signal.SIGTERM
_GRACE_SECONDS = {signal.SIGINT: 1.5, signal.SIGTERM: 0.05}  # for a better message to come first
_WHY = {
    signal.SIGINT: "was interrupted (Ctrl-C)",
    signal.SIGTERM: "was ended from outside: Ctrl-C, or its launcher stopped the job (SIGTERM)",
}


class Watch:
    """What both kinds share: the thread, this rank's report, the signals, and how to end."""

    def __init__(self, rank: int, timeout_seconds: float) -> None:
        self.rank, self.timeout_seconds = rank, timeout_seconds
        self._report, self._since = Report(), 0.0
        self._main = threading.main_thread().ident
        self._grace = dict(_GRACE_SECONDS)
        self._signalled: tuple[float, int] | None = None
        self._leaving = threading.Event()
        self._all_left = threading.Event()
        self._failure: str | None = None
        self._alarm, alarm = os.pipe()
        os.set_blocking(alarm, False)
        self._wake = alarm
        if threading.current_thread() is threading.main_thread():
            # Written to by C code at once, also while the main thread waits in MXNet.
            signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, lambda *_: None)
        self._thread = threading.Thread(target=self._run, name="gluonpar.watch", daemon=True)

    def start(self) -> None:
        """Begin to watch and be watched."""
        self._thread.start()

    def enter(self, what: str) -> int:
        """This rank begins its next operation; its number."""
        self._report = Report(self._report.operation + 1, what, 0.0)
        self._since = time.monotonic()
        return self._report.operation

    def leave(self) -> None:
        """The operation is done."""
        self._report = Report(self._report.operation, self._report.what)

    def fail(self, why: str) -> None:
        """End the job because of this rank: ``why`` completes "rank 1 ...". Does not return."""
        self._failure = why
        self._poke()
        time.sleep(5)
        ending.leave(FAILED)

    def let_sigterm_wait(self, seconds: float) -> None:
        """The program ends in order when it gets SIGTERM; end it only if that takes longer."""
        self._grace[signal.SIGTERM] = seconds

    def goodbye(self) -> None:
        """This rank's program is over. Wait until all others' are, or the job is ended."""
        self._leaving.set()
        self._poke()
        self._all_left.wait()

    def _poke(self) -> None:
        os.write(self._wake, b"\0")

    def _own_report(self) -> Report:
        report = self._report
        seconds = None if report.waiting_seconds is None else time.monotonic() - self._since
        return Report(report.operation, report.what, seconds, self._where())

    def _where(self) -> str:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return ""
        code = frame.f_code
        return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"

    def _wait(self, lines: list) -> list:
        """Those of ``lines`` on which something has come; takes note of signals."""
        seconds = BEAT_SECONDS / 2
        if self._signalled:  # mpirun kills a quarter of a second after it has sent SIGTERM
            seconds = min(seconds, max(0.0, self._signalled[0] - time.monotonic()) + 0.01)
        ready, _, _ = select.select([self._alarm, *lines], [], [], seconds)
        if self._alarm in ready:
            ready.remove(self._alarm)
            for number in os.read(self._alarm, 64):
                if number in self._grace and self._signalled is None:
                    self._signalled = time.monotonic() + self._grace[number], number
        return ready

    def _due_signal(self) -> int | None:
        """A signal that this rank has got and has had its time for."""
        if self._signalled and time.monotonic() > self._signalled[0]:
            return self._signalled[1]
        return None

    def _run(self) -> None:
        raise NotImplementedError


class RankZero(Watch):
    """Rank 0's: hears everybody, judges, and tells all what is decided."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        super().__init__(0, timeout_seconds)
        self._judge = Judge(size, timeout_seconds, time.monotonic())
        self._judge.hello(0, socket.gethostname(), os.getpid(), time.monotonic())
        self._token = secrets.token_hex(16)
        self._launchers_output = ending.output_of_the_launcher()
        self._listener = wire.listen(size)
        self._lines: dict[int, wire.Line] = {}
        self._strangers: list[wire.Line] = []

    @property
    def invitation(self) -> dict:
        """What the other ranks need to find this one."""
        return {
            "addresses": wire.addresses(),
            "port": self._listener.getsockname()[1],
            "token": self._token,
            "name": self._judge.names[0],
        }

    def _run(self) -> None:
        last_beat = 0.0
        while True:
            lines = [*self._strangers, *self._lines.values()]
            for ready in self._wait([self._listener, *lines]):
                if ready is self._listener:
                    self._strangers.append(wire.Line(self._listener.accept()[0]))
                else:
                    self._hear(ready)
            now = time.monotonic()
            self._judge.report(0, self._own_report(), now)
            self._hear_oneself()
            verdict = self._judge.verdict(now)
            if verdict:
                self._end(verdict)
            if self._judge.all_left:
                self._tell(all_left=True)
                self._all_left.set()
                return
            if now - last_beat >= BEAT_SECONDS:
                self._tell(beat=True)
                last_beat = now

    def _hear_oneself(self) -> None:
        if self._failure:
            self._judge.failed(0, self._failure)
        elif self._due_signal():
            silent = self._judge.silent(3 * BEAT_SECONDS, time.monotonic())
            why = _WHY[self._due_signal()]
            self._judge.blame(f"{silent}, and rank 0 {why}" if silent else f"rank 0 {why}")
        elif self._leaving.is_set():
            self._judge.left(0)

    def _hear(self, line: wire.Line) -> None:
        messages = line.receive()
        if messages is None:
            if line in self._strangers:
                self._strangers.remove(line)
            else:
                del self._lines[line.rank]
                self._judge.lost(line.rank)
            return
        for message in messages:
            if line.rank < 0:
                self._welcome(line, message)
            elif "over" in message:  # this rank had been given up, and has come back to life
                ending.leave(FAILED)
            elif "failed" in message:
                self._judge.failed(line.rank, message["failed"])
            elif "goodbye" in message:
                self._judge.left(line.rank)
            else:
                self._judge.report(line.rank, Report(**message["report"]), time.monotonic())

    def _welcome(self, line: wire.Line, message: dict) -> None:
        if message.get("token") != self._token:
            return
        line.rank = message["rank"]
        self._strangers.remove(line)
        self._lines[line.rank] = line
        self._judge.hello(line.rank, message["host"], message["pid"], time.monotonic())
        line.send(welcome=True)

    def _tell(self, **message: Any) -> None:
        for line in self._lines.values():
            line.send(**message)

    def _end(self, verdict: str) -> None:
        ending.say(verdict, self._launchers_output if self._signalled else None)
        self._tell(stop=True)
        ending.urge_the_launcher()
        signalled = self._signalled[1] if self._signalled else None
        ending.leave(FAILED if signalled is None else 128 + signalled)


class OtherRank(Watch):
    """Any other rank's: reports to rank 0's, and ends when told, or when rank 0 is lost."""

    def __init__(self, rank: int, timeout_seconds: float, invitation: dict) -> None:
        super().__init__(rank, timeout_seconds)
        self._name_of_zero, self._token = invitation["name"], invitation["token"]
        self._line = self._connect(invitation)
        self._heard = time.monotonic()

    def _connect(self, invitation: dict) -> wire.Line:
        hello = {
            "token": invitation["token"],
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        return wire.call(invitation["addresses"], invitation["port"], hello)

    def _run(self) -> None:
        last_beat, told = 0.0, False
        while True:
            for line in self._wait([self._line]):
                self._obey(line.receive())
            now = time.monotonic()
            why = self._failure or _WHY.get(self._due_signal())
            if why and not told:
                self._line.send(failed=why)
                told = True
            if now - last_beat >= BEAT_SECONDS:
                self._line.send(report=asdict(self._own_report()))
                if self._leaving.is_set():
                    self._line.send(goodbye=True)
                last_beat = now
            if now - self._heard > self.timeout_seconds:
                self._give_up(
                    f"has been silent for {now - self._heard:.0f} s: stopped, or its "
                    "machine or the network is down"
                )
            if self._all_left.is_set():
                return

    def _obey(self, messages: list[dict] | None) -> None:
        if messages is None:
            self._give_up("died without a word: killed (kill -9, out of memory) or crashed")
        for message in messages:
            self._heard = time.monotonic()
            if "stop" in message:
                ending.leave(FAILED)
            if "all_left" in message:
                self._all_left.set()

    def _give_up(self, why: str) -> None:
        """Rank 0 is lost. The lower ranks go first, and end the job before the others speak."""
        time.sleep(min(self.rank - 1, 10) * 0.4)
        if ending.speaks_first(self._token):
            ending.say(f"{self._name_of_zero} {why}")
        self._line.send(over=True)
        ending.leave(FAILED)
