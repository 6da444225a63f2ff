"""What the benchmarks' tests share: a script run in this process, and actors for candidates."""

import importlib.util
import os
import pathlib
import sys

from benchmarks.training import candidates, contest, soak

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


def load(name):
    """The script of that name, imported."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runner(script, capsys):
    """run(*arguments): exit code, lines on stdout, lines on stderr."""

    def run(*arguments):
        try:
            code = script.main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


def expect_one_line(outcome, words):
    """A refused request: exit code 2, nothing printed but one error with these words."""
    code, out, err = outcome
    assert (code, out, len(err)) == (2, [], 1)
    assert "error: " in err[0]
    assert words in err[0]


def played_by(monkeypatch, **sources):
    """Let these candidates' processes run the given source instead of the worker."""
    for name in sources:
        monkeypatch.setitem(candidates.CANDIDATES, name, candidates.Candidate(name, "planted"))
    real = candidates.launch

    def launch(name, setting):
        if name in sources:
            return [sys.executable, "-c", sources[name]], os.environ
        return real(name, setting)

    for module in (contest, soak):
        monkeypatch.setattr(module, "launch", launch)


def actor(loss=1.0, then="pass", trained=None, **more):
    """Source of a process that answers as a worker does and needs no time.

    ``trained`` is what it answers after steps where that is not as usual; its values are
    expressions of ``steps``, asked for now, and ``total``.
    """
    report = {"loss": loss, "peak_bytes": 5, "idle_seconds": 1, "idle_cpu_seconds": 0}
    replicas = {"devices": 2, "parameters": 8, "differing": 0, "not_finite": 0}
    report.update({"memory": [], "replicas": replicas, **more})
    usual = {"seconds": "0.01 * steps", "cpu_seconds": "0.02 * steps", "resident_bytes": "5"}
    usual.update({"threads": "3", "descriptors": "7"}, **(trained or {}))
    items = ", ".join(f"{name!r}: {value}" for name, value in usual.items())
    ready = {"loss": 2.0, "ours": False, "version": ""}
    return (
        f"import json, sys\nprint(json.dumps({ready}), flush=True)\ntotal = 0\n"
        "for line in sys.stdin:\n"
        f" steps = json.loads(line).get('steps', 0)\n total += steps\n {then}\n"
        f" trained = {{{items}}}\n"
        f" print(json.dumps(trained if steps else {report}), flush=True)\n"
    )
