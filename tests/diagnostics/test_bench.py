"""The all-reduce benchmark: figures, table, JSON; a wrong algorithm is reported."""

import json
import threading
from pathlib import Path

import commands
import mxnet as mx
import numpy as np
import pytest
from processes import end

from gluonpar import collectives
from gluonpar.collectives import arguments
from gluonpar.diagnostics import bench
from gluonpar.plans import registry

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_allreduce.py"
SMALL = ("--min-bytes", "4K", "--max-bytes", "8K", "--factor", "2", "--iters", "2", "--warmup", "1")
ON_CPU = ("--device", "cpu", *SMALL)
COLUMNS = 10


@pytest.fixture
def command(capsys):
    return commands.runner(bench, capsys)


def table(out):
    """Return the rows as lists of cells; names may contain a space."""
    others = ["gluonpar", "mxnet device", "mxnet local", "numpy"]
    names = sorted([*collectives.ALGORITHMS, *others], key=len)
    rows = []
    for line in out:
        name = next((n for n in reversed(names) if f" {n} " in line), None)
        if name is not None and line.split()[0].isdigit():
            before, _, after = line.partition(f" {name} ")
            rows.append([*before.split(), name, *after.split()])
    return rows


@pytest.mark.parametrize(
    ("collective", "factor"),  # on four devices, by nccl-tests' doc/PERFORMANCE.md
    [
        ("allreduce", 1.5),
        ("broadcast", 1),
        ("reduce", 1),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
    ],
)
@pytest.mark.parametrize("options", [[], ["--dtype", "float16", "--op", "mean"]])
def test_every_collective_is_right_and_has_its_factor(
    command, tmp_path, collective, factor, options
):
    options = options if collective in bench.ADDING else options[:2]
    path = tmp_path / "bench.json"
    to_measure = ("--collective", collective, "--num-gpus", 4, *options)
    code, out, err = command(*ON_CPU, *to_measure, "--json", path)
    assert code == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(table(out)) >= 4
    for row in rows:
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["num_bytes"] / row["median_seconds"] / 1e9)
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
def test_a_collective_that_leaves_out_a_device_is_reported(command, monkeypatch, collective):
    function = getattr(collectives, collective)

    def without_the_last(data, **options):
        function(data[:-1], **options)

    monkeypatch.setattr(collectives, collective, without_the_last)
    options = ["--algorithms", "star"] if collective == "allreduce" else []
    code, out, err = command(*ON_CPU, "--collective", collective, "--num-gpus", 3, *options)
    assert code == 1
    wrong = {row[2]: int(row[-1]) for row in table(out)}
    ours = "star" if collective == "allreduce" else "gluonpar"
    assert {name for name, number in wrong.items() if number} == {ours}
    assert f"{ours} at 4096 bytes, {ours} at 8192 bytes" in err[-1]


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("k", [2, 3])
def test_all_candidates_are_right_and_those_without_the_op_are_left_out(command, op, k):
    size = ("--min-bytes", 4004, "--max-bytes", 4004)
    code, out, err = command(*ON_CPU, *size, "--op", op, "--num-gpus", k)
    lacking = ["kvstore"] if op in ("max", "min") else []
    lacking += [] if op == "sum" else ["mxnet device", "mxnet local"]
    assert code == 0
    assert [line.split(":")[1].strip() for line in err] == lacking
    assert all(repr(op) in line for line in err)
    every = {*collectives.usable([mx.cpu(0)]), "mxnet device", "mxnet local", "numpy"}
    assert {row[2] for row in table(out)} == every - {*lacking}
    assert all(row[-1] == "0" and (row[7] == "-") == (op != "sum") for row in table(out))


@pytest.mark.parametrize("collective", bench.COLLECTIVES)
def test_numpy_sums_large_arrays_on_threads(command, monkeypatch, collective):
    monkeypatch.setattr(bench, "NUMPY_MIN_BYTES", 0)
    monkeypatch.setattr(bench, "NUMPY_THREADS", 2)
    sum_blocks, threads = bench._sum_blocks, set()

    def noting(task, op):
        threads.add(threading.get_ident())
        sum_blocks(task, op)

    monkeypatch.setattr(bench, "_sum_blocks", noting)
    assert command(*ON_CPU, "--num-gpus", 3, "--collective", collective)[0] == 0
    assert len(threads) > 1


def test_timed_payloads_do_not_overflow(command, monkeypatch):
    allreduce, given = collectives.allreduce, []

    def noting(data, **options):
        given.append(data)
        allreduce(data, **options)

    monkeypatch.setattr(collectives, "allreduce", noting)
    command(*ON_CPU, "--dtype", "float16", "--algorithms", "star", "--iters", 40)
    for array in given[-1]:
        assert not array.asnumpy().any()


def test_the_table_and_the_json_have_a_row_for_every_size_and_candidate(command, tmp_path):
    path = tmp_path / "bench.json"
    code, out, err = command(*ON_CPU, "--json", path)
    assert (code, err) == (0, [])
    rows, written = table(out), json.loads(path.read_text())
    names = [*collectives.usable([mx.cpu(0)]), "mxnet device", "mxnet local", "numpy"]
    assert [row[:3] for row in rows] == [
        [num_bytes, elements, name]
        for num_bytes, elements in (("4096", "1024"), ("8192", "2048"))
        for name in names
    ]
    for row, result in zip(rows, written["rows"]):
        assert row[:3] == [str(result[key]) for key in ("num_bytes", "elements", "name")]
        assert len(row) == COLUMNS and row[-1] == "0"
        assert row[5] == row[6]  # algbw is busbw for two devices
        assert row[7] == "1.00" or row[2] != "mxnet device"
        assert row[8] == "1.00" or row[2] != "numpy"
        assert len(result["seconds"]) == 2
        assert result["median_seconds"] == pytest.approx(np.median(result["seconds"]))
    assert written["machine"]["cores"] >= 1
    assert written["arguments"]["min_bytes"] == 4096
    average = np.mean([row["busbw"] for row in written["rows"] if row["name"] == "host"])
    assert f"host {average:.3f}" in out[-1]


def test_an_algorithm_that_misplaces_chunks_is_reported(command):
    @registry.register_executor("planted")
    def rotate(lists, op):
        collectives.named("host").run(lists, op)
        for data in lists:
            for array in data:
                half = array.size // 2
                array[:] = mx.nd.concat(array[half:], array[:half], dim=0)

    try:
        for dtype in arguments.DTYPES:
            code, out, _ = command(*ON_CPU, "--algorithms", "planted", "--dtype", dtype)
            assert code == 1
            assert all(int(row[-1]) > 0 for row in table(out) if row[2] == "planted")
    finally:
        del collectives.ALGORITHMS["planted"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--min-bytes", "many"), "'many'"),
        (("--min-bytes", "16K"), "max_bytes=8192, got 16384"),
        (("--min-bytes", "2"), "at least 4, one float32"),
        (("--max-bytes", "8G"), "max_bytes must be less than 8589934592, got 8589934592"),
        (("--factor", "1"), "--factor: must be a number of at least 2, got '1'"),
        (("--iters", "nan"), "--iters: must be a number of at least 1, got 'nan'"),
        (("--warmup", "-1"), "--warmup"),
        (("--num-gpus", "0"), "num_gpus must be at least 1, got 0"),
        (("--num-gpus", "1"), "one device has nothing to exchange"),
        (("--algorithms", "ring,nope"), "'nope'; choose from star, "),
        (("--op", "mean", "--dtype", "int8"), "int8"),
        (("--collective", "reduce", "--algorithms", "ring"), "--algorithms are those of allreduce"),
        (("--collective", "broadcast", "--op", "max"), "broadcast adds nothing"),
        (("--json", "/nowhere/to/be/found.json"), "cannot write /nowhere/to/be/found.json"),
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
    assert [row[0] for row in table(out)] == ["4096"] * 4
    assert len(json.loads(path.read_text())["rows"]) == 4
    assert err[-1].endswith(": interrupted")


def test_other_errors_keep_their_traceback(command, monkeypatch):
    def broken(*_):
        raise mx.base.MXNetError("out of memory")

    monkeypatch.setattr(bench, "measure_size", broken)
    with pytest.raises(mx.base.MXNetError, match="out of memory"):
        command(*ON_CPU)


@pytest.mark.slow
@pytest.mark.parametrize("program", [[SCRIPT], ["-m", "gluonpar", "bench"]])
def test_it_runs_as_a_script_and_as_a_command(program):
    done = end(*program, *ON_CPU, "--algorithms", "ring")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(table(done.stdout.splitlines())) == 2 * 4
