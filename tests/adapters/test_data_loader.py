"""gluonpar.DataLoader: what samples draw. tests/cluster tests which samples a rank loads."""

import itertools
import json
import random
import sys

import numpy as np
import pytest
from mxnet import gluon

import gluonpar
from tests.support import random_samples
from tests.support.mpi_jobs import mpirun, needs_mpi, succeed
from tests.support.random_samples import ARRAYS, CASES, DATASETS, NUMBER, epochs, loader, rows

SEEDED = sorted({*DATASETS} - {"mxnet"})
PROGRAM = [sys.executable, random_samples.__file__]


def draws(*of_epochs):
    """All numbers that were drawn, without those that say which sample it is."""
    return [number for epoch in of_epochs for row in epoch for number in row[1:]]


def all_differ(numbers):
    return len({*numbers}) == len(numbers)


@pytest.mark.parametrize("name, shuffle", [("own", False), *((name, True) for name in SEEDED)])
def test_draws_follow_from_seed_epoch_and_position_for_any_number_of_workers(name, shuffle):
    (first, second), after = epochs(name, shuffle=shuffle)
    for workers in (0, 3):
        assert epochs(name, num_workers=workers, shuffle=shuffle) == ([first, second], after)
    np.random.seed(5)
    random.seed(5)
    stock = gluon.data.DataLoader(ARRAYS[0], 4, shuffle=shuffle)
    for epoch in (first, second):
        assert [row[0] for row in epoch] == [x for batch in stock for x in batch.asnumpy()]
    assert after == (np.random.rand(), random.random())
    (other, _), _ = epochs(name, seed=6, shuffle=shuffle)
    if name == "list":  # a batch draws once for all its samples
        first, second, other = (of_batches(epoch) for epoch in (first, second, other))
        assert len(first) == len(second) == -(-NUMBER // 4)
    assert all_differ(draws(first, second, other))


def of_batches(epoch):
    return [(None, *drawn) for drawn in dict.fromkeys(row[1:] for row in epoch)]


@needs_mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_draw_what_one_process_draws(ranks, tmp_path):
    succeed(mpirun((ranks, [*PROGRAM, str(tmp_path / "drawn")])))
    found = dict(zip(map(str, CASES), json.loads((tmp_path / "drawn").read_text())))
    for name, how in CASES:
        of_ranks, after = found[str((name, how))]
        of_ranks = [[tuple(row) for row in epoch] for epoch in of_ranks]
        if name == "mxnet":  # each rank's workers have seeds of their own
            assert all_differ(draws(*of_ranks))
            assert of_ranks == [[tuple(row) for row in e] for e in found[str(CASES[-1])][0]]
        else:
            assert (of_ranks, tuple(after)) == epochs(name, **how)


@pytest.mark.parametrize("how", [{}, {"thread_pool": True}])
def test_mxnet_draws_in_workers_follow_from_the_seed_and_all_differ(how):
    (first, second), _ = epochs("mxnet", num_workers=1, **how)
    assert all_differ(draws(first, second))
    for workers in (2, 3):
        assert epochs("mxnet", num_workers=workers, **how)[0] == [first, second]
    assert {*draws(first)}.isdisjoint(draws(*epochs("mxnet", seed=6, num_workers=1, **how)[0]))


def test_threads_draw_from_the_programs_own_generators():
    [drawn], _ = epochs("transform", number=1, num_workers=1, thread_pool=True)
    random.seed(5)
    np.random.seed(5)
    assert drawn == [(x, np.random.rand(), random.random(), np.random.randn()) for x in ARRAYS[0]]


def test_loaders_draw_apart_and_do_not_change_what_others_draw():
    [alone], _ = epochs("own", number=1)
    [_, after_alone], _ = epochs("own")
    np.random.seed(5)
    np.random.randn()  # which leaves one number in the state
    both = [loader("own"), loader("own"), loader("transform")]
    assert all_differ(draws(*map(rows, both), *map(rows, both)))
    np.random.seed(5)
    both = [loader("own"), loader("own")]
    together = [[*pair] for pair in zip(*both)]
    assert rows(a for a, _ in together) == alone
    assert rows(both[1])  # a second epoch of the other loader
    assert rows(both[0]) == after_alone


def test_runs_without_a_seed_differ():
    seeds = [None, None]
    assert all_differ(draws(*(epochs("own", number=1, seed=seed)[0][0] for seed in seeds)))


@pytest.mark.parametrize("reloads", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have(workers, reloads):
    how = {"num_workers": workers, "auto_reload": reloads}
    want, _ = epochs("own", number=4, **how)
    np.random.seed(5)
    resumed = loader("own", **how)
    resumed.set_epoch(2)
    resumed.set_epoch(2)
    # In the middle of an epoch: the batches that the run has trained on are skipped.
    assert rows(itertools.islice(resumed, 2, None)) == want[2][8:]
    resumed.set_epoch(3)
    assert rows(resumed) == want[3]
    with pytest.raises(ValueError, match="-1"):
        resumed.set_epoch(-1)


def test_a_shuffled_run_is_resumed_by_the_generators_state():
    np.random.seed(5)
    loads = loader("own", shuffle=True)
    rows(loads)
    state = np.random.get_state()
    want = rows(loads)
    np.random.set_state(state)
    assert rows(loader("own", shuffle=True)) == want


def test_an_error_in_a_transform_leaves_the_generators_as_they_were():
    def fail(x):
        random.random()
        np.random.rand()
        raise KeyError(x)

    np.random.seed(5)
    random.seed(5)
    with pytest.raises(KeyError):
        [*gluonpar.DataLoader(gluon.data.ArrayDataset(ARRAYS[0]).transform(fail), 4)]
    after = np.random.rand(), random.random()
    np.random.seed(5)
    random.seed(5)
    assert after == (np.random.rand(), random.random())


class OwnList(list):
    def __getitem__(self, i):
        return draw_one(super().__getitem__(i))


def draw_one(x):
    return np.array([x, np.random.rand()])


@pytest.mark.parametrize(
    "dataset, draws",
    [
        (ARRAYS[0], False),
        ([*ARRAYS[0]], False),
        (gluon.data.ArrayDataset(*ARRAYS), False),
        (gluon.data.SimpleDataset(ARRAYS[0]).take(8), False),
        (OwnList(ARRAYS[0]), True),
        (gluon.data.SimpleDataset(OwnList(ARRAYS[0])), True),
    ],
)
def test_generators_are_seeded_where_a_programs_code_runs_and_nowhere_else(
    dataset, draws, monkeypatch
):
    seeds = []
    monkeypatch.setattr(np.random, "seed", seeds.append)
    [*gluonpar.DataLoader(dataset, 4)]
    assert len({*seeds}) == (len(dataset) if draws else 0)
