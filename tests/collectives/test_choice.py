"""The choice of a plan for GPUs by measured links: right, repeatable, and read from a file."""

import itertools
import json
import pathlib
import time

import mxnet as mx
import numpy as np
import pytest

from benchmarks import choice as known_links
from gluonpar.collectives import arguments, choice, probing, simulate
from gluonpar.collectives.links import TOPOLOGIES, Link, MeasuredLinks, full

LENET = 516_272


@pytest.fixture(autouse=True)
def no_peer_access(monkeypatch):
    monkeypatch.setattr(choice.peers, "between_all", lambda ctx: False)
    monkeypatch.delenv("MXNET_ENFORCE_DETERMINISM", raising=False)


def chosen(k, num_bytes, first=None):
    ctx = [first if first and i == 0 else mx.gpu(i) for i in range(k)]
    return choice.choose(arguments.Kind((num_bytes // 4,), np.dtype("float32"), ctx))


def saved(path, measured):
    path.write_text(json.dumps({"links": measured.as_dict()}))
    return str(path)


def links_of(name, k, message_seconds=0.0):
    return known_links.measured(TOPOLOGIES[name](k), 5e11, message_seconds)


@pytest.mark.parametrize("message_seconds", [0.0, 4e-5])
@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_the_plan_chosen_by_measured_links_is_close_to_the_fastest_on_the_links(k, message_seconds):
    rows = known_links.table(k, message_seconds)
    assert len(rows) == 15
    for row in rows:
        assert row.seconds[row.chosen] <= 1.2 * row.seconds[row.best]
        assert row.seconds[row.chosen] <= 1.1 * row.seconds[row.before]


def test_the_table_of_the_docs_is_the_benchmarks(capsys):
    known_links.main([])
    docs = pathlib.Path(__file__).parents[2] / "docs" / "algorithms.md"
    assert f"```\n{capsys.readouterr().out}```\n" in docs.read_text("utf-8")


@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("name", sorted(TOPOLOGIES))
def test_links_made_of_measurements_measure_the_same(name, k):
    found = links_of(name, k)
    again = known_links.measured(found.topology(), 5e11, 0.0)
    for one, two in zip(found[1:3] + found[4:6], again[1:3] + again[4:6]):
        np.testing.assert_allclose(one, two, rtol=1e-2)
    # Where everything is slowed at one place, all at once is as slow; elsewhere no faster.
    assert (again.at_once >= 0.49 * found.at_once).all()
    assert again.at_once.sum() <= 1.3 * found.at_once.sum()


def test_no_device_and_no_direction_is_taken_for_another(tmp_path):
    random, k = np.random.default_rng(1), 4
    latency, bandwidth = random.uniform(1e-6, 2e-6, (k, k)), random.uniform(1e9, 2e9, (k, k))
    apart = ~np.eye(k, dtype=bool)
    of_two = np.array([np.where(apart, bandwidth, 0).max(axis) for axis in (1, 0)])
    of_two += random.uniform(0, 1e9, (2, k)).clip(max=2e9 - of_two.max())
    names = [f"gpu({i})" for i in range(k)]
    found = MeasuredLinks(names, latency, bandwidth, bandwidth, *of_two, 1e15, 0.0)
    again = known_links.measured(found.topology(), 1e15, 0.0)
    for one, two in zip(found[1:6], again[1:6]):
        same = apart if one.ndim == 2 else ...
        np.testing.assert_allclose(one[same], two[same], rtol=5e-3)

    pair = found.between(["gpu(3)", "gpu(1)"])
    assert (pair.latency[0, 1], pair.bandwidth[1, 0]) == (latency[3, 1], bandwidth[1, 3])
    assert (pair.outgoing[0], pair.incoming[1]) == (of_two[0, 3], of_two[1, 1])
    path = saved(tmp_path / "links.json", found)
    first = simulate("star", 3, 1e6, path).timed[1]  # from device 2 to device 0
    assert first.end - first.begin == pytest.approx(latency[2, 0] + 1e6 / bandwidth[2, 0], rel=1e-4)


def test_two_messages_on_a_shared_link_are_seen_and_simulated():
    on = full(2, Link(1e-5, 1e9), duplex=False)
    found = known_links.measured(on, 1e15, 0.0)
    assert found.bandwidth[0, 1] == pytest.approx(1e9, rel=1e-2)
    assert found.at_once[0, 1] == pytest.approx(5e8, rel=1e-2)
    assert simulate("ring", 2, 1e8, found).seconds == pytest.approx(
        simulate("ring", 2, 1e8, on).seconds, rel=1e-2
    )


@pytest.mark.parametrize("first", [None, mx.cpu(0)])
@pytest.mark.parametrize("k", [3, 4, 8])
def test_on_assumed_links_small_arrays_take_few_messages_and_large_ones_the_shortest_path(
    k, first, monkeypatch
):
    monkeypatch.setenv("GLUONPAR_LINKS", "off")
    assert chosen(k, 4, first).algorithm == ("star" if k == 3 else "tree")
    assert chosen(k, 1 << 30, first).algorithm == "bidirectional-ring"
    changes = [chosen(k, 1 << log, first).algorithm for log in range(2, 31)]
    assert changes == sorted(changes, key=changes.index)  # never back to one of before


def test_lenets_gradients_on_eight_take_the_tree(monkeypatch, tmp_path):
    monkeypatch.setenv("GLUONPAR_LINKS", "off")
    assert chosen(8, LENET).algorithm == "tree"
    for name in TOPOLOGIES:
        path = saved(tmp_path / f"{name}.json", links_of(name, 8, 4e-5))
        monkeypatch.setenv("GLUONPAR_LINKS", path)
        assert chosen(8, LENET).algorithm == "tree"


def test_the_figures_of_a_file_decide_and_are_named(monkeypatch, tmp_path):
    path = saved(tmp_path / "links.json", links_of("pcie", 8))
    monkeypatch.setenv("GLUONPAR_LINKS", path)
    found = chosen(4, 100_000_000)
    estimated = choice.estimates(links_of("pcie", 8).between([f"gpu({i})" for i in range(4)]), 1e8)
    assert found.algorithm == next(iter(estimated))
    assert path in found.why and "100000000" in found.why
    assert f"{1e3 * estimated[found.algorithm]:.3g} ms" in found.why
    same = (simulate("ring", 8, 1e8, on).seconds for on in (path, links_of("pcie", 8)))
    assert len({*same}) == 1


@pytest.mark.parametrize(
    ("content", "quoted"),
    [
        (None, "No such file"),
        ("[1, 2]", "bench --links"),
        ("no JSON", "bench --links"),
        ('{"links": {"devices": ["gpu(0)"]}}', "bench --links"),
        ("two devices", r"gpu\(2\) .*gpu\(0\), gpu\(1\)"),
        ("no bandwidth", "bench --links"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(content, quoted, monkeypatch, tmp_path):
    path = tmp_path / "links.json"
    measured = links_of("full", 2)
    if content == "two devices":
        saved(path, measured)
    elif content == "no bandwidth":
        saved(path, measured._replace(bandwidth=0 * measured.bandwidth, at_once=np.zeros((2, 2))))
    elif content is not None:
        path.write_text(content)
    monkeypatch.setenv("GLUONPAR_LINKS", str(path))
    for refused in (
        lambda: chosen(3, LENET),
        lambda: choice.check_algorithm(None, [mx.gpu(i) for i in range(3)]),  # before training
    ):
        with pytest.raises(ValueError, match=quoted) as caught:
            refused()
        assert str(path) in str(caught.value)
    choice.check_algorithm(None, [mx.cpu(0), mx.cpu(1)])


def test_without_a_file_the_links_are_measured_once(monkeypatch):
    calls = []

    def measure(ctx):
        calls.append([*ctx])
        return MEASURE(CPUS[: len(ctx)])

    monkeypatch.setattr(choice.probing, "measure", measure)
    monkeypatch.delenv("GLUONPAR_LINKS", raising=False)
    choice._links.cache_clear()
    for num_bytes in (4, LENET, 1 << 20):
        assert chosen(3, num_bytes).algorithm in choice.registry.ALGORITHMS
    assert calls == [[mx.gpu(0), mx.gpu(1), mx.gpu(2)]]
    # Results that must repeat do not depend on times, and a context twice has no link to itself.
    monkeypatch.setenv("MXNET_ENFORCE_DETERMINISM", "1")
    assert "assumed" in chosen(4, LENET).why
    monkeypatch.setenv("MXNET_ENFORCE_DETERMINISM", "0")
    kind = arguments.Kind((8,), np.dtype("float32"), [mx.gpu(0), mx.gpu(0)])
    assert "assumed" in choice.choose(kind).why
    assert len(calls) == 1
    choice._links.cache_clear()


MEASURE, CPUS = probing.measure, [mx.cpu(i) for i in range(3)]


def test_each_time_is_that_of_its_devices_with_waiting(monkeypatch):
    now = [0.0]
    copyto, add = mx.nd.NDArray.copyto, mx.nd.broadcast_add

    def slow(self, other):
        if isinstance(other, mx.nd.NDArray):
            i, j = self.context.device_id, other.context.device_id
            now[0] += 1 + 3 * i + j + (self.size > 1) * 4096 / (10 + 3 * i + j)
        return copyto(self, other)

    def slow_sum(one, two, out):
        now[0] += 3 * 4096 / (1 + one.context.device_id)
        return add(one, two, out=out)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(mx.nd.NDArray, "copyto", slow)
    monkeypatch.setattr(mx.nd, "broadcast_add", slow_sum)
    seconds = probing.measure(CPUS, num_bytes=4096, rounds=2, burst=2)
    found = probing.links([*map(str, CPUS)], 4096, 2, seconds)
    for i, j in itertools.permutations(range(3), 2):
        assert found.latency[i, j] == 1 + 3 * i + j
        assert found.bandwidth[i, j] == pytest.approx(10 + 3 * i + j)
    # Here messages follow one another, so all at once is the sum of their times.
    for pairs in ([(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]):
        total = sum(found.latency[p] + 4096 / found.bandwidth[p] for p in pairs)
        for pair in pairs:
            assert seconds["at once"][pair] == [pytest.approx(total)] * 2
    of_two = sum(found.latency[1, j] + 4096 / found.bandwidth[1, j] for j in (0, 2))
    assert seconds["out"][1,] == [pytest.approx(of_two)] * 2
    of_two = sum(found.latency[i, 1] + 4096 / found.bandwidth[i, 1] for i in (0, 2))
    assert seconds["in"][1,] == [pytest.approx(of_two)] * 2
    assert found.memory_bandwidth == pytest.approx(1)  # the slowest
