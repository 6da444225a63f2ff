"""verify --report: its words follow its figures, and what fails is a finding, not the end."""

import copy
import errno
import json
import math
import time

import mxnet as mx
import pytest

from gluonpar import __main__ as command
from gluonpar import collectives
from gluonpar.diagnostics.benchmark import steps
from gluonpar.diagnostics.child_process import ChildFailed
from gluonpar.diagnostics.report import conclusions, measurement, parts, writing
from gluonpar.diagnostics.report.page import page

GPUS = [
    {"index": i, "name": "Tesla T4", "capability": [7, 5], "memory_bytes": 16 << 30}
    for i in range(3)
]


def reduced(name, num_bytes, seconds, wrong=0):
    figures = {"median_seconds": seconds, "busbw": num_bytes / seconds / 1e9, "wrong": wrong}
    return {"name": name, "num_bytes": num_bytes, "seconds": [seconds] * 9, **figures}


def stepped(name, k, seconds, loss=1.5):
    speed = {"median_seconds": seconds, "images_per_second": 8 * k / seconds, "loss": loss}
    setting = {"workload": "lenet", "name": name, "num_devices": k, "batch_size": 8 * k}
    return {**setting, "seconds": [seconds] * 9, **speed}


@pytest.fixture
def report():
    """Figures of three GPUs on which all is well."""
    pairs = [[i, j] for i in range(3) for j in range(3) if i != j]
    machine = {"wheels": ["mxnet-cu112"], "processor": "any", "cores": 4, "date": "2020-02-02"}
    machine.update(gluonpar="1", mxnet="1.9.1", numpy="1.26", python="3.11", gpus=["gpu 0 Tesla"])
    names = ["gpu(0)", "gpu(1)", "gpu(2)"]
    libraries = [["CUDA", "11.8"], ["cuDNN", "8.9.6"]]
    return {
        "command": "python -m gluonpar verify",
        "took_seconds": 1.0,
        "machine": machine,
        "devices": {"names": names, "gpus": GPUS, "peers": pairs, "libraries": libraries},
        "doctor": [{"topic": "mpi", "state": "ok", "text": "mpi4py", "remedy": ""}],
        "self test": {"lines": ["ok     copies", "ok     sums"], "failures": []},
        "copies": {
            "rows": [
                {"src": 0, "dst": 1, "num_bytes": 1 << 20, "algbw": 12.5, "seconds": [8e-5] * 9}
            ]
        },
        "all-reduce": {
            "rows": [
                reduced("tree", 4096, 100e-6),
                reduced("star", 4096, 101e-6),
                reduced("mxnet device", 4096, 300e-6),
            ],
            "choices": [{"num_bytes": 4096, "algorithm": "tree", "why": "few messages"}],
        },
        "steps": {
            "rows": [
                stepped("gluonpar", 1, 4e-3),
                stepped("mxnet device", 1, 4e-3),
                stepped("gluonpar", 2, 5e-3),
                stepped("mxnet device", 2, 10e-3, loss=1.501),
                stepped("mxnet nccl", 2, 8e-3),
            ]
        },
        "failed": [],
    }


def found(report, state=None):
    """The findings that are in ``state``, as "topic: text"."""
    findings = conclusions.conclude(report)
    return [f"{f.topic}: {f.text}" for f in findings if state in (None, f.state)]


def test_where_all_is_well_nothing_is_wrong_and_nothing_noted(report):
    assert found(report, "wrong") == found(report, "note") == []
    assert len(found(report, "ok")) == 6


def test_the_choice_is_compared_with_the_fastest(report):
    def verdict():
        (finding,) = [f for f in conclusions.conclude(report) if f.topic == "all-reduce"]
        return finding.state, finding.text

    rows = report["all-reduce"]["rows"]
    assert verdict()[0] == "ok" and "tree, is the fastest: 100 us" in verdict()[1]
    rows[1] = reduced("star", 4096, 92e-6)  # less than 10% faster
    assert verdict()[0] == "ok" and "1.09 times as long as the fastest, star" in verdict()[1]
    rows[2] = reduced("mxnet device", 4096, 50e-6)
    assert verdict()[0] == "note"
    assert "4 KiB: the choice, tree, takes 2.00 times as long" in verdict()[1]
    assert "mxnet device: 100 us and 50 us" in verdict()[1]
    del rows[0]
    assert verdict()[0] == "wrong" and "tree is chosen, but has failed" in verdict()[1]


def test_scaling_and_the_ratio_to_mxnet_follow_from_the_medians(report):
    words = "\n".join(found(report))
    assert "lenet on 2 devices: 1.60 times the images/s of one device: efficiency 80%" in words
    ratio = "lenet on 2 devices: gluonpar takes 0.62 times as long as mxnet nccl: 5.00 ms and 8.00"
    assert ratio in words
    report["steps"]["rows"][0] = stepped("gluonpar", 1, 5e-3)
    assert "lenet on 1 device: gluonpar takes 1.25 times as long" in found(report, "note")[0]


@pytest.mark.parametrize(("seconds", "state"), [(4e-3, "ok"), (2.5e-3, "note")])
def test_an_efficiency_that_cannot_be_is_no_result(report, seconds, state):
    report["steps"]["rows"] = [stepped("gluonpar", 1, 4e-3), stepped("gluonpar", 2, seconds)]
    (finding,) = [f for f in conclusions.conclude(report) if "images/s" in f.text]
    assert finding.state == state
    assert ("efficiency" in finding.text) == (state == "ok")


def test_medians_of_few_samples_are_noted(report):
    report["all-reduce"]["rows"][1]["seconds"] = [100e-6, 102e-6]
    (finding,) = found(report, "note")
    assert finding.startswith("all-reduce: ") and " 2, " in finding


def test_pairs_without_peer_access_are_named(report):
    report["devices"]["peers"] = [[0, 1], [1, 0], [0, 2]]
    (finding,) = found(report, "note")
    assert "peer access" in finding and "0-2, 1-2" in finding and "0-1" not in finding


def test_no_finding_rests_on_times_of_simulated_gpus(report):
    report["machine"]["gpus"] = ["gpu 0 Simulated GPU 0, compute capability 8.6"]
    (note,) = found(report, "note")
    assert "simulated GPUs: times mean nothing" in note
    assert not any(unit in line for line in found(report) for unit in (" us", " ms", "images/s"))
    report["findings"] = [finding._asdict() for finding in conclusions.conclude(report)]
    titles = [line for line in page(report).splitlines() if line.startswith("## ")]
    assert len(titles) == 4
    assert all("simulated" in title for title in titles if title != "## Findings")
    report["devices"].update(gpus=[], names=["cpu(0)", "cpu(1)", "cpu(2)"])
    assert any("images/s" in line for line in found(report))  # beside a simulator, but on CPUs


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (lambda r: r["self test"]["failures"].append("all-reduce ring: 3 values"), "ring: 3 val"),
        (lambda r: r["all-reduce"]["rows"].append(reduced("ring", 8192, 1, 7)), "ring, 8 KiB: 7"),
        (lambda r: r["steps"]["rows"].append(stepped("mxnet local", 2, 1, 1.7)), "local 1.7"),
        (lambda r: r["steps"]["rows"].append(stepped("mxnet local", 2, 1, None)), "local None"),
        (
            lambda r: r["doctor"].append(
                {"topic": "driver", "state": "wrong", "text": "too old", "remedy": "update"}
            ),
            "doctor: driver: too old",
        ),
        (
            lambda r: r["failed"].append(
                {"part": "lenet", "num_devices": 2, "candidate": "gluonpar", "how": "signal 11"}
            ),
            "lenet: with gluonpar on 2 devices: signal 11",
        ),
        (
            lambda r: r["failed"].append(
                {"part": "self test", "num_devices": 3, "candidate": None, "how": "signal 6"}
            ),
            "self test: on 3 devices: signal 6",
        ),
    ],
)
def test_what_is_wrong_comes_first(report, plant, words):
    plant(report)
    (finding,) = found(report, "wrong")
    assert words in finding and found(report)[0] == finding


def test_a_failure_of_mxnet_alone_is_noted(report):
    how = {"part": "lenet", "num_devices": 2, "candidate": "mxnet nccl", "how": "no NCCL"}
    report["failed"].append(how)
    assert found(report, "wrong") == []
    assert "lenet: with mxnet nccl on 2 devices: no NCCL" in found(report, "note")


def test_the_page_has_the_devices_every_finding_and_the_figures(report):
    report["findings"] = [finding._asdict() for finding in conclusions.conclude(report)]
    text = page(report)
    for words in ["Tesla T4, compute capability 7.5, 16.0 GiB", "cuDNN 8.9.6", "gpu(2)"]:
        assert words in text
    for finding in found(report):
        assert finding in text
    assert "| tree | *chosen* 100.0 (0.04) |" in text
    assert "| mxnet nccl | - | 8.00 (2000) |" in text


# Measuring: failures, time, and what is told


def children(monkeypatch, answer):
    """Let ``answer(part, without)`` give what a part tells, and return the parts asked for."""
    asked = []

    def messages(command, environment=None):
        given = json.loads(command[-1])
        asked.append({**given, "environment": environment})
        yield from answer(given)

    monkeypatch.setattr(measurement, "messages", messages)
    monkeypatch.setattr(measurement, "CHECKS", {})
    return asked


def test_a_benchmark_is_repeated_without_the_candidate_that_failed(monkeypatch):
    def answer(given):
        for name in ("gluonpar", "mxnet device"):
            if name not in given.get("without", ()):
                yield {"candidate": name}
                if (given.get("workload"), name) == ("lenet", "mxnet device"):
                    raise ChildFailed("signal 11")
                yield {"rows": {"workload": given.get("workload"), "name": name}}

    children(monkeypatch, answer)
    report = measurement.collect([mx.cpu(0)])
    (failed,) = report["failed"]
    assert (failed["part"], failed["candidate"], failed["how"]) == (
        "lenet",
        "mxnet device",
        "signal 11",
    )
    names = [(row["workload"], row["name"]) for row in report["steps"]["rows"]]
    assert names == [
        ("lenet", "gluonpar"),
        ("resnet18", "gluonpar"),
        ("resnet18", "mxnet device"),
    ]


def test_a_candidate_that_failed_is_not_tried_again_with_more_devices(monkeypatch):
    def answer(given):
        if "mxnet device" not in given.get("without", ["mxnet device"]):
            yield {"candidate": "mxnet device"}
            raise ChildFailed("no result")

    asked = children(monkeypatch, answer)
    report = measurement.collect([mx.cpu(i) for i in range(3)])
    lenet = [(len(g["devices"]), g["without"]) for g in asked if g.get("workload") == "lenet"]
    assert lenet == [(1, []), *((k, ["mxnet device"]) for k in (1, 2, 3))]
    assert {failed["part"] for failed in report["failed"]} == {
        "copies",
        "all-reduce",
        "lenet",
        "resnet18",
    }


def test_a_part_that_fails_before_any_candidate_is_not_repeated(monkeypatch):
    def answer(given):
        raise ChildFailed("exit code 1")
        yield

    asked = children(monkeypatch, answer)
    report = measurement.collect([mx.cpu(0), mx.cpu(1)])
    assert len(asked) == len(report["failed"]) == 2 + 2 + 4


def test_the_self_test_computes_in_float32_and_the_benchmarks_as_users_do(monkeypatch):
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    asked = children(monkeypatch, lambda given: [])
    measurement.collect([mx.cpu(0), mx.cpu(1)])
    (self_test,) = [given for given in asked if given["environment"] is not None]
    assert self_test["part"] == "self test" and len(asked) > 4
    assert self_test["environment"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert self_test["environment"]["PATH"]


@pytest.mark.parametrize(
    ("k", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])]
)
def test_steps_are_measured_on_1_2_4_and_all_devices(k, counts, monkeypatch):
    asked = children(monkeypatch, lambda given: [])
    measurement.collect([mx.cpu(i) for i in range(k)], batch_size=5)
    for workload in ("lenet", "resnet18"):
        mine = [given for given in asked if given.get("workload") == workload]
        assert [len(given["devices"]) for given in mine] == counts
        assert {given["batch_size"] for given in mine} == {5}
    assert ("copies" in {given["part"] for given in asked}) == (k > 1)


def told(capsys):
    """What was told to the parent."""
    lines = capsys.readouterr().out.splitlines()
    return [json.loads(line.split(":", 1)[1]) for line in lines if line.startswith("gluonpar-")]


@pytest.fixture
def fresh(monkeypatch):
    """A process in which no candidate had its turn."""
    monkeypatch.setattr(parts, "_told", {})


def part(name, k=2, **given):
    devices = [("cpu", i) for i in range(k)]
    parts.main(json.dumps({"part": name, "devices": devices, **given}))


def test_an_exception_in_a_candidate_s_turn_names_it(monkeypatch, capsys, fresh):
    calls = []

    def broken(lists, op, accumulate):
        calls.append(op)
        if len(calls) > 1:  # when all have had a turn
            raise mx.MXNetError("CUDA: no kernel image")

    algorithm = collectives.named("star")._replace(plan=None, run=broken)
    monkeypatch.setitem(collectives.ALGORITHMS, "star", algorithm)
    part("all-reduce", deadline=0, without=[])
    *_, last, end = told(capsys)
    assert last == {"message": {"candidate": "star"}}
    assert end == {"failed": "MXNetError: CUDA: no kernel image"}


def test_a_candidate_is_told_at_once_and_then_once_per_second(monkeypatch, capsys, fresh):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for i in range(100):
        clock[0] = 0.05 * i
        parts._announce("ab"[i % 2])
    names = [message["message"]["candidate"] for message in told(capsys)]
    assert names[:2] == ["a", "b"] and 5 <= len(names) <= 7


def test_without_the_one_that_fails_the_others_are_measured(monkeypatch, capsys, fresh):
    monkeypatch.setattr(parts, "ALLREDUCE_BYTES", (4096, 8192))
    everyone = [*collectives.usable([mx.cpu(0)]), "mxnet device", "mxnet local"]
    part("all-reduce", deadline=0, without=everyone[3:])
    rows = [m["message"]["rows"] for m in told(capsys) if "rows" in m.get("message", {})]
    assert [(row["num_bytes"], row["name"]) for row in rows] == [
        (num_bytes, name) for num_bytes in (4096, 8192) for name in everyone[:3]
    ]
    assert all(len(row["seconds"]) == 1 and row["wrong"] == 0 for row in rows)


def test_candidates_train_as_one_and_a_wrong_update_is_seen(monkeypatch):
    ctx = [mx.cpu(0), mx.cpu(1)]

    def measure():
        rows = steps.measure("lenet", ctx, steps.candidates(ctx), batch_size=3, rounds=1)
        return [row.as_dict() for row in rows]

    def wrong(rows):
        report = {"steps": {"rows": rows}}
        return [finding.text for finding in conclusions._losses(report)]

    rows = measure()
    assert [row["name"] for row in rows] == ["gluonpar", "mxnet device"]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-4)
    for row in rows:
        assert row["images_per_second"] * row["median_seconds"] == pytest.approx(6)
    assert wrong(rows) == []
    train_batch = steps.train_batch

    def halved(X, y, params, ctx, lr):
        return train_batch(X, y, params, ctx, lr / 2)

    monkeypatch.setattr(steps, "train_batch", halved)
    assert len(wrong(measure())) == 1


@pytest.fixture
def clock(monkeypatch):
    """Stop the time that samples are taken with; return what lets it pass."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_a_step_s_time_does_not_depend_on_how_many_are_in_a_sample(monkeypatch, clock):
    losses = [mx.nd.ones((4,))]
    for seconds in (1e-3, 0.04, 7.0):
        monkeypatch.setattr(steps, "_make", lambda *_, s=seconds: lambda: clock(s) or losses)
        (row,) = steps.measure("lenet", [mx.cpu(0)], ["gluonpar"], batch_size=4, rounds=2)
        assert row.samples.median == pytest.approx(seconds)


# The command


def run(*arguments):
    return command.main(["verify", "--device", "cpu", *map(str, arguments)])


@pytest.mark.parametrize(
    ("name", "words"),
    [("report.txt", "*.json"), ("nowhere/report.json", "cannot write"), ("folder.json", "regular")],
)
def test_a_report_that_cannot_be_written_is_refused_at_once(name, words, tmp_path, capsys):
    (tmp_path / "folder.json").mkdir()
    assert run("--report", tmp_path / name) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err


@pytest.fixture
def planned(monkeypatch, report):
    monkeypatch.setattr(measurement, "collect", lambda *_: copy.deepcopy(report))
    return report


def test_the_exit_code_says_whether_something_is_wrong(planned, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert run("--report", path) == 0
    assert json.loads(path.read_text())["findings"]
    planned["self test"]["failures"].append("all-reduce ring: wrong")
    assert run("--report", path) == 1
    assert "WRONG  self test: all-reduce ring" in capsys.readouterr().out


def test_findings_are_printed_even_if_the_disk_has_become_full(
    planned, tmp_path, monkeypatch, capsys
):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.files, "atomic_write", full)
    assert run("--report", tmp_path / "report.json") == 2
    captured = capsys.readouterr()
    assert "ok     self test: 2 checks" in captured.out
    assert captured.err.count("\n") == 1 and "No space left on device" in captured.err


def test_ctrl_c_is_one_line(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "collect", interrupted)
    assert run("--report", tmp_path / "report.json") == 130
    assert "nothing is written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_if_the_page_cannot_be_made_nothing_is_written(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "page", lambda report: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--report", tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == []


def figures(value, path=""):
    """Every number below ``value``, with its place."""
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, list):
        value = list(enumerate(value))
    else:
        return [(path, value)] if isinstance(value, (int, float)) else []
    return [entry for key, each in value for entry in figures(each, f"{path}/{key}")]


@pytest.mark.slow
def test_the_whole_report_on_two_cpu_contexts(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert run("--report", path, "--seconds", 1, "--batch-size", 2) == 0
    captured = capsys.readouterr()
    report = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert report["failed"] == [] and not report["simulated"]
    assert report["machine"]["mxnet"] == mx.__version__
    lines = [line for lines in report["self test"]["lines"] for line in lines.splitlines()]
    assert captured.out.splitlines()[1 : 1 + len(lines)] == lines
    for part in ("doctor", "self test", "copies", "all-reduce", "lenet", "resnet18"):
        assert part in captured.err
    assert {(row["src"], row["dst"]) for row in report["copies"]["rows"]} == {(0, 1), (1, 0)}
    names = {row["name"] for row in report["all-reduce"]["rows"]}
    assert names == {*collectives.usable([mx.cpu(0)]), "mxnet device", "mxnet local"}
    assert {
        (row["workload"], row["name"], row["num_devices"]) for row in report["steps"]["rows"]
    } == {
        (workload, name, k)
        for workload in ("lenet", "resnet18")
        for name in ("gluonpar", "mxnet device")
        for k in (1, 2)
    }
    for part in ("copies", "all-reduce", "steps"):
        for row in report[part]["rows"]:
            assert all(math.isfinite(number) for _, number in figures(row))
            assert row["median_seconds"] > 0 and min(row["seconds"]) > 0
    assert [f["text"] for f in report["findings"]] == [f.text for f in conclusions.conclude(report)]
    text = path.with_suffix(".md").read_text()
    assert text.startswith("# gluonpar on cpu(0), cpu(1)")
    assert len([line for line in text.splitlines() if line.startswith("| ")]) > 20
