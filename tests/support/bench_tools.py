"""For tests of benchmarks: run a command line in this process; stand-ins for candidates."""

import itertools
import pathlib
import sys
import types

import psutil

from benchmarks import jobs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def runner(script, capsys):
    """Return run(*arguments), which returns exit code, lines on stdout, lines on stderr."""

    def run(*arguments):
        try:
            code = script.main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


def expect_one_line(outcome, words):
    """Check a refused request: exit code 2, no output but one error with these words."""
    code, out, err = outcome
    assert (code, out, len(err)) == (2, [], 1)
    assert "error: " in err[0]
    assert words in err[0]


def program(source, **more):
    """Return a candidate whose process runs ``source`` in place of the worker."""

    def launch(job):
        arguments = (str(job.port), str(job.num_devices))
        job.start([sys.executable, "-c", source, *arguments])

    return jobs.Program("planted", "planted", launch=launch, **more)


def actor(loss=1.0, then="pass", seconds="0.01 * steps", wrong=0, hello=None, **report):
    """Return the source of a process that answers as a worker does and needs no time.

    ``then`` is a statement before each answer; ``seconds``, which an answer to steps contains, an
    expression of ``steps`` and ``total``, the steps so far; ``wrong`` is how many of its sums are;
    ``report`` what its report has.
    """
    replicas = {"devices": 2, "parameters": 8, "differing": 0, "not_finite": 0}
    report = {"loss": loss, "memory": [], "replicas": replicas, **report}
    report = {"idle_seconds": 1, "idle_cpu_seconds": 0, **report}
    ready = {"rank": 0, "loss": 2.0, "imports_gluonpar": False, "version": ""}
    return (
        "import json, os, socket, sys\n"
        "lines = socket.create_connection(('127.0.0.1', int(sys.argv[1]))).makefile('rw')\n"
        f"ready = {hello or ready}\nready['pid'] = os.getpid()\n"
        "print(json.dumps(ready), file=lines, flush=True)\ntotal = 0\n"
        "for line in lines:\n"
        " message = json.loads(line)\n steps = message.get('steps', 0)\n total += steps\n"
        f" {then}\n"
        f" trained = {{'seconds': {seconds}, 'cpu_seconds': 0.02 * steps}}\n"
        f" summed = {{'seconds': 0.01, 'wrong': {wrong}}} if 'sum' in message else {report}\n"
        " print(json.dumps(trained if steps else summed), file=lines, flush=True)\n"
    )


def plant_statistics(monkeypatch, **changed):
    """Let psutil tell of each process what functions of the sample's number return."""

    class Process:
        def __init__(self, pid):
            usual = {"resident_bytes": 10**8, "threads": 3, "descriptors": 7}
            counter = itertools.count()
            self.now = lambda: {
                name: changed.get(name, lambda i, value=value: value)(self.sample)
                for name, value in usual.items()
            }
            self.next = lambda: next(counter)

        def memory_info(self):
            self.sample = self.next()
            return types.SimpleNamespace(rss=self.now()["resident_bytes"])

        def num_threads(self):
            return self.now()["threads"]

        def num_fds(self):
            return self.now()["descriptors"]

    monkeypatch.setattr(psutil, "Process", Process)
