"""The benchmarks' harness: the order of the candidates, which samples count, what is reported."""

import gc
import time

import mxnet as mx
import pytest

from gluonpar.diagnostics import harness
from gluonpar.diagnostics.harness import Candidate, Samples


def test_candidates_take_turns_and_warm_up_rounds_do_not_count():
    log, shown = [], []

    def progress(rounds):
        shown.extend(rounds)
        return shown

    candidates = [Candidate(name, run=lambda name=name: log.append(name)) for name in "ABC"]
    samples = harness.interleaved(candidates, rounds=4, warmup=2, progress=progress)
    rounds = ["".join(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert [sorted(round_) for round_ in rounds] == [["A", "B", "C"]] * 6
    assert len(set(rounds)) > 1  # the order changes
    assert {name: len(each.values) for name, each in samples.items()} == dict.fromkeys("ABC", 4)
    assert len(shown) == 6


def test_waiting_is_in_the_sample_and_what_mxnet_did_before_is_not(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def takes(seconds):
        return lambda: clock.__setitem__(0, clock[0] + seconds)

    candidate = Candidate("a", run=takes(1.0), wait=takes(10.0))
    monkeypatch.setattr(mx.nd, "waitall", takes(100.0))
    assert harness.interleaved([candidate], rounds=2)["a"].values == [11.0, 11.0]


def test_the_garbage_collector_is_off_during_the_samples_and_on_again_after_an_error():
    seen = []

    def fail():
        seen.append(gc.isenabled())
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        harness.interleaved([Candidate("a", run=fail)], rounds=1)
    assert seen == [False]
    assert gc.isenabled()


def test_median_quartiles_and_spread():
    samples = Samples((9.0, 1.0, 3.0, 2.0, 4.0))
    assert (samples.median, samples.quartiles, samples.spread) == (3.0, [2.0, 4.0], 2.0)
    assert (Samples((5.0,)).median, Samples((5.0,)).spread) == (5.0, 0.0)
