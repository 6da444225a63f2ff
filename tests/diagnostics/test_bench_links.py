"""gluonpar bench --links: tables, a file that simulate reads, a heat map, refused requests."""

import json

import bench_tools
import matplotlib.image
import pytest

from gluonpar.collectives import simulate
from gluonpar.collectives.links import read
from gluonpar.diagnostics import bench

SMALL = ("--links", "--device", "cpu", "--max-bytes", "4K", "--iters", "2", "--warmup", "1")


@pytest.fixture
def command(capsys):
    return bench_tools.runner(bench, capsys)


def test_tables_file_and_simulation_have_the_same_figures(command, tmp_path):
    path, picture = tmp_path / "links.json", tmp_path / "links.png"
    code, out, err = command(*SMALL, "--num-gpus", 3, "--json", path, "--plot", picture)
    assert (code, err) == (0, [])
    measured, names = read(path), ["cpu(0)", "cpu(1)", "cpu(2)"]
    assert measured.devices == names
    heads = [i for i, line in enumerate(out) if line.split() == names]
    matrices = (1e6 * measured.latency, measured.bandwidth / 1e9, measured.at_once / 1e9)
    assert len(heads) == len(matrices)
    for head, matrix in zip(heads, matrices):
        for i, name in enumerate(names):
            figures = [f"{matrix[i, j]:.3g}" for j in range(3) if j != i]
            assert out[head + 1 + i].split() == [name, *figures]
    for i, name in enumerate(names):
        both = (f"{values[i] / 1e9:.3g}" for values in (measured.outgoing, measured.incoming))
        assert f"{name} {' '.join(both)}" in [" ".join(line.split()) for line in out]

    [line] = [line for line in out if line.split()[:2] == ["100", "MB,"]]
    hops = len(simulate("ring", 3, 1e8, str(path)).hops)
    seconds = simulate("ring", 3, 1e8, str(path)).seconds + hops * measured.message_seconds
    assert f" ring {1e3 * seconds:.3g}" in line

    rows = json.loads(path.read_text())["rows"]
    count = {"latency": 6, "alone": 6, "at once": 6, "out": 3, "in": 3, "sum": 3, "message": 1}
    assert {what: sum(row["what"] == what for row in rows) for what in count} == count
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    for row in rows:
        if row["what"] == "latency":
            i, j = map(names.index, row["devices"])
            assert measured.latency[i, j] == row["median_seconds"]
    assert matplotlib.image.imread(picture).std() > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num-gpus", "1"), "at least 2 with --links, got 1"),
        (("--max-bytes", "0"), "got 0"),
        (("--max-bytes", "8G"), "got 8589934592"),
        (("--op", "max"), "--op"),
        (("--algorithms", "ring"), "--algorithms"),
        (("--min-bytes", "8K"), "--min-bytes"),
        (("--json", "nowhere/links.json"), "nowhere/links.json"),
        (("--plot", "links.txt"), "links.txt"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_one_line(arguments, words, command):
    bench_tools.expect_one_line(command(*SMALL, *arguments), words)
