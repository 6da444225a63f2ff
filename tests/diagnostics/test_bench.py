"""The all-reduce benchmark: figures, table, JSON; a wrong algorithm is reported."""

import json
import re

import mxnet as mx
import numpy as np
import pytest

from gluonpar import collectives
from gluonpar.diagnostics import bench
from gluonpar.options import COLLECTIVES
from tests.support import commands

SMALL = ("--min-bytes", "4K", "--max-bytes", "8K", "--factor", "2", "--iters", "2", "--warmup", "1")
ON_CPU = ("--device", "cpu", *SMALL)
OTHERS = ["mxnet device", "mxnet local", "numpy"]
HEADINGS = "name time iqr algbw busbw to_device to_numpy wrong".split()
# On four devices, by nccl-tests' doc/PERFORMANCE.md.
FACTORS = dict(allreduce=1.5, broadcast=1, reduce=1, reduce_scatter=0.75, all_gather=0.75)


@pytest.fixture
def command(capsys):
    return commands.runner(bench, capsys)


def table(out):
    """Return the rows as dictionaries by heading, with the bytes and elements above them."""
    rows, size = [], None
    for line in out:
        if re.fullmatch(r"\d+ bytes, \d+ elements", line):
            size = [int(number) for number in re.findall(r"\d+", line)]
        cells = [line[:18].strip(), *line[18:].split()]
        if size and len(cells) == len(HEADINGS) and cells[-1].isdigit():
            rows.append({**dict(zip(HEADINGS, cells)), "size": size})
    return rows


@pytest.mark.parametrize("collective", FACTORS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_collective_is_right_and_has_its_factor(command, tmp_path, collective, dtype):
    path = tmp_path / "bench.json"
    to_measure = ("--collective", collective, "--num-gpus", 4, "--dtype", dtype)
    code, out, err = command(*ON_CPU, "--min-bytes", 4004, *to_measure, "--json", path)
    assert code == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(table(out)) >= 2
    for row in rows:
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["num_bytes"] / row["median_seconds"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"] * FACTORS[collective])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_collective_that_misplaces_chunks_is_reported(command, monkeypatch, collective, dtype):
    function = getattr(collectives, collective)

    def rotating(data, **options):
        function(data, **options)
        for array in data:
            half = array.size // 2
            array[:] = mx.nd.concat(array[half:], array[:half], dim=0)

    monkeypatch.setattr(collectives, collective, rotating)
    options = ["--algorithms", "star"] if collective == "allreduce" else []
    options += ["--collective", collective, "--num-gpus", 3, "--dtype", dtype]
    code, out, err = command(*ON_CPU, *options)
    ours = "star" if collective == "allreduce" else "gluonpar"
    assert code == 1
    assert {row["name"] for row in table(out) if int(row["wrong"])} == {ours}
    assert f"{ours} at 4096 bytes, {ours} at 8192 bytes" in err[-1]


def test_timed_payloads_do_not_overflow(command, monkeypatch):
    allreduce, given = collectives.allreduce, []

    def noting(data, **options):
        given.append(data)
        allreduce(data, **options)

    monkeypatch.setattr(collectives, "allreduce", noting)
    command(*ON_CPU, "--dtype", "float16", "--algorithms", "star", "--iters", 40)
    for array in given[-1]:
        assert not array.asnumpy().any()


def test_the_table_fits_80_columns_and_has_the_rows_of_the_json(command, tmp_path):
    path = tmp_path / "bench.json"
    code, out, err = command(*ON_CPU, "--json", path)
    assert (code, err) == (0, []) and max(map(len, out)) <= 80
    rows, written = table(out), json.loads(path.read_text())
    names = [*collectives.usable([mx.cpu(0)]), *OTHERS]
    expected = [[size, name] for size in ([4096, 1024], [8192, 2048]) for name in names]
    assert [[row["size"], row["name"]] for row in rows] == expected
    for row, result in zip(rows, written["rows"]):
        assert row["size"] == [result["num_bytes"], result["elements"]]
        assert row["name"] == result["name"]
        assert row["wrong"] == "0" and row["algbw"] == row["busbw"]  # for two devices
        assert row["to_device"] == "1.00" or row["name"] != "mxnet device"
        assert len(result["seconds"]) == 2
        assert result["median_seconds"] == pytest.approx(np.median(result["seconds"]))
    machine = written["machine"]
    assert machine["cores"] >= 1 and machine["processor"] and machine["mxnet"].startswith("1.")
    assert {"gpus", "python", "numpy", "gluonpar", "date"} <= set(machine)
    assert written["arguments"]["min_bytes"] == 4096


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--min-bytes", "many"), "'many'"),
        (("--min-bytes", "16K"), "--max-bytes 8192, got 16384"),
        (("--min-bytes", "2"), "at least 4, one float32"),
        (("--factor", "1"), "--factor must be at least 2, got 1"),
        (("--iters", "nan"), "--iters: invalid int value: 'nan'"),
        (("--warmup", "-1"), "--warmup"),
        (("--num-gpus", "0"), "--num-gpus must be at least 2, got 0"),
        (("--num-gpus", "1"), "--num-gpus must be at least 2, got 1"),
        (("--algorithms", "ring,nope"), "must be one of star, "),
        (("--algorithms", "nccl"), "nccl"),
        (
            ("--collective", "reduce", "--algorithms", "ring"),
            "--algorithms must be left out with reduce",
        ),
        (("--min-bytes", "99G", "--max-bytes", "99G"), "--max-bytes must be below"),
        (("--min-bytes", "4K", "--max-bytes", "99999G"), "--max-bytes must be below"),
        (("--json", "/nowhere/to/be/found.json"), "cannot write /nowhere/to/be/found.json"),
        (("--json", "/dev/full"), "cannot write /dev/full: No space left"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(command, arguments, words):
    code, out, err = command(*ON_CPU, *arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert "error: " in err[0] and words in err[0]


def test_ctrl_c_keeps_the_rows_so_far(command, monkeypatch, tmp_path):
    measure_size = bench.measure_size

    def interrupted_at_the_second(names, options, ctx, size):
        if size > 1024:
            raise KeyboardInterrupt
        return measure_size(names, options, ctx, size)

    monkeypatch.setattr(bench, "measure_size", interrupted_at_the_second)
    path = tmp_path / "bench.json"
    code, out, err = command(*ON_CPU, "--algorithms", "host", "--json", path)
    assert code == 130
    assert [row["size"][0] for row in table(out)] == [4096] * 4
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert err[-1].endswith(": interrupted")
