"""The benchmarks' common part: who runs when, what counts, what is reported."""

import gc
import itertools
import json
import time
from collections import Counter

import pytest

from gluonpar.diagnostics.benchmark import measure
from gluonpar.diagnostics.benchmark.measure import Candidate, Samples


def recorders(names, log):
    return [
        Candidate(
            name,
            run=lambda name=name: log.append(f"run {name}"),
            wait=lambda name=name: log.append(f"wait {name}"),
            prepare=lambda name=name: log.append(f"prepare {name}"),
        )
        for name in names
    ]


@pytest.mark.parametrize("n", range(1, 13))
def test_every_round_is_a_permutation(n):
    for round_ in range(-5, 3 * n):
        assert sorted(measure.order(n, round_)) == list(range(n))


@pytest.mark.parametrize("n", range(2, 13))
def test_over_2n_rounds_places_and_neighbours_are_balanced(n):
    rows = [measure.order(n, round_) for round_ in range(2 * n)]
    places = Counter((i, place) for row in rows for place, i in enumerate(row))
    follows = Counter(pair for row in rows for pair in zip(row, row[1:]))
    assert places == Counter({pair: 2 for pair in itertools.product(range(n), repeat=2)})
    assert follows == Counter({pair: 2 for pair in itertools.permutations(range(n), 2)})


def test_candidates_take_turns_and_warm_up_rounds_do_not_count():
    log = []
    samples = measure.interleaved(recorders("ABC", log), rounds=4, warmup=2)
    runs = [entry[4:] for entry in log if entry.startswith("run")]
    rounds = ["".join(runs[i : i + 3]) for i in range(0, len(runs), 3)]
    assert rounds == ["".join("ABC"[i] for i in measure.order(3, r)) for r in range(-2, 4)]
    assert {name: len(each.seconds) for name, each in samples.items()} == dict.fromkeys("ABC", 4)


def test_each_sample_is_prepared_run_and_waited_for():
    log = []
    measure.interleaved(recorders("AB", log), rounds=1)
    assert log == ["prepare A", "run A", "wait A", "prepare B", "run B", "wait B"]


def test_waiting_is_in_the_sample_and_preparing_is_not(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def takes(seconds):
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    candidate = Candidate("a", run=takes(1.0), wait=takes(10.0), prepare=takes(100.0))
    assert measure.interleaved([candidate], rounds=2)["a"].seconds == (11.0, 11.0)


def test_the_collector_rests_meanwhile_and_is_back_after_an_error():
    seen = []

    def fail():
        seen.append(gc.isenabled())
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        measure.interleaved([Candidate("a", run=fail)], rounds=1)
    assert seen == [False]
    assert gc.isenabled()


def test_progress_sees_all_rounds():
    seen = []

    def progress(rounds):
        for round_ in rounds:
            seen.append(round_)
            yield round_

    measure.interleaved(recorders("A", []), rounds=3, warmup=1, progress=progress)
    assert len(seen) == 4


def test_median_quartiles_and_spread():
    samples = Samples((9.0, 1.0, 3.0, 2.0, 4.0))
    assert (samples.median, samples.quartiles, samples.spread) == (3.0, (2.0, 4.0), 2.0)
    assert (Samples((5.0,)).median, Samples((5.0,)).spread) == (5.0, 0.0)


@pytest.mark.parametrize(
    ("names", "rounds", "warmup", "words"),
    [
        ("", 1, 0, r"candidates \[\]"),
        ("AA", 1, 0, r"candidates \['A', 'A'\]"),
        ("A", 0, 0, "rounds=0"),
        ("A", 1, -1, "warmup=-1"),
    ],
)
def test_what_cannot_be_measured_is_an_error(names, rounds, warmup, words):
    with pytest.raises(ValueError, match=words):
        measure.interleaved(recorders(names, []), rounds, warmup)


def test_the_machine_is_described_and_json_takes_it():
    machine = measure.machine()
    assert json.loads(json.dumps(machine)) == machine
    assert machine["cores"] >= 1
    assert machine["mxnet"].startswith("1.")
    assert {"processor", "gpus", "python", "numpy", "gluonpar", "date"} <= set(machine)


def test_the_processor_s_name(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU: fast\n\nmodel name\t: Other\n")
    assert measure._processor(str(cpuinfo)) == "Some CPU: fast"
    assert measure._processor(str(tmp_path / "none"))


def test_json_round_trip(tmp_path):
    path = tmp_path / "a.json"
    content = {"rows": [{"seconds": [1e-6, 0.1 + 0.2]}]}
    measure.write_json(str(path), content)
    assert json.loads(path.read_text()) == content


def test_an_unwritable_path_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"cannot write {tmp_path}: .*directory"):
        measure.write_json(str(tmp_path), {})
