"""verify --report: what the commands print is kept, and figures that cannot be true are not."""

import json

import mxnet as mx
import pytest

from gluonpar import __main__ as gluonpar
from gluonpar.diagnostics import report

BENCH = {"rows": [{"seconds": [0.1, 0.2]}]}


def verify(*arguments):
    return gluonpar.main(["verify", "--device", "cpu", *map(str, arguments)])


@pytest.mark.slow
def test_the_whole_report_on_two_cpu_contexts(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert verify("--report", path) == 0
    written = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert written["machine"]["mxnet"] == mx.__version__
    parts = {part["name"]: part for part in written["parts"]}
    assert list(parts) == ["doctor", "verify", "bench", report.ALONE, "profile of 2 devices"]
    assert all(part["exit_code"] == 0 for part in parts.values())
    assert parts["doctor"]["result"]["wrong"] == 0
    assert "all is right on these devices" in parts["verify"]["output"]
    assert {"host", "mxnet device"} <= {row["name"] for row in parts["bench"]["result"]["rows"]}
    assert "ms per step" in parts["profile of 2 devices"]["output"]
    printed, page = capsys.readouterr().out, path.with_suffix(".html").read_text()
    for part in written["parts"]:
        assert f"<h2>{part['name']}" in page
        if not part["refused"]:  # other programs run beside it
            assert part["output"] in printed
            assert part["output"].splitlines()[-1].replace("'", "&#x27;") in page


def planned(monkeypatch, gpus=(), **results):
    """Let the parts have these results, without running anything."""
    monkeypatch.setattr(report.harness, "machine", lambda: {"gpus": list(gpus)})
    names = {"bench": "bench", "alone": report.ALONE, "both": "profile of 2 devices"}
    monkeypatch.setattr(report, "commands", lambda *_: {names[n]: [n] for n in results})

    def run(arguments):
        (name,) = arguments
        part = {"command": ["gluonpar", name], "seconds": 1.0, "exit_code": 0}
        return {**part, "output": f"figures of <{name}>", "result": results[name]}

    monkeypatch.setattr(report, "run", run)


def epochs(speed):
    return [{"images_per_second": 1.0}, {"images_per_second": speed}]


@pytest.mark.parametrize(
    ("results", "refused"),
    [
        ({"alone": epochs(1000.0), "both": epochs(2150.0)}, []),
        ({"alone": epochs(1000.0), "both": epochs(2300.0)}, ["both"]),
        ({"alone": None, "both": epochs(2300.0)}, []),
        ({"alone": epochs(1000.0), "bench": BENCH}, []),
    ],
)
def test_figures_that_cannot_be_true_are_refused(results, refused, monkeypatch, tmp_path):
    planned(monkeypatch, **results)
    path = tmp_path / "report.json"
    assert verify("--report", path) == 0
    parts = {part["command"][1]: part for part in json.loads(path.read_text())["parts"]}
    page = path.with_suffix(".html").read_text()
    for name, part in parts.items():
        assert bool(part["refused"]) == (name in refused), part
        assert part["result"] == (None if name in refused else results[name])
        assert (f"figures of &lt;{name}&gt;" in page) == (name not in refused)


@pytest.mark.parametrize(("context", "refused"), [(mx.gpu, True), (mx.cpu, False)])
def test_times_of_simulated_gpus_are_refused(context, refused, monkeypatch):
    planned(monkeypatch, gpus=["gpu 0 Simulated GPU 0"], bench=BENCH)
    (part,) = report.collect([context(0), context(1)])["parts"]
    assert ("simulated" in part["refused"]) == refused == (part["result"] is None)


def test_a_command_that_fails_or_hangs_ends_no_report(monkeypatch, tmp_path):
    arguments = {"fails": ["bench", "--iters", "0"], "hangs": ["--version"]}
    monkeypatch.setattr(report, "commands", lambda *_: arguments)
    run, names = report.subprocess.run, iter(arguments)

    def running(command, timeout, **options):
        return run(command, timeout=0.01 if next(names) == "hangs" else timeout, **options)

    monkeypatch.setattr(report.subprocess, "run", running)
    path = tmp_path / "report.json"
    assert verify("--report", path) == 1
    fails, hangs = json.loads(path.read_text())["parts"]
    assert fails["exit_code"] == 2 and "--iters" in fails["output"]
    assert hangs["exit_code"] is None and "no result within" in hangs["output"]


@pytest.mark.parametrize("name", ["report.txt", "nowhere/report.json", "folder.json"])
def test_a_report_that_cannot_be_written_is_one_line(name, tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(SystemExit, match="2"):
        verify("--report", tmp_path / name)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("python -m gluonpar verify: error: ")
