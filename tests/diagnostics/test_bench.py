"""The all-reduce benchmark: figures, table, JSON; a wrong algorithm is reported."""

import json
import subprocess
import sys

import bench_tools
import mxnet as mx
import numpy as np
import pytest

from gluonpar import collectives
from gluonpar.diagnostics import bench
from gluonpar.diagnostics.bench import Result, Setting
from gluonpar.diagnostics.harness import Samples
from gluonpar.plans import registry
from gluonpar.plans.algorithms import star

SCRIPT = bench_tools.ROOT / "scripts" / "bench_allreduce.py"
SMALL = ("--min-bytes", "4K", "--max-bytes", "8K", "--factor", "2", "--iters", "2", "--warmup", "1")
ON_CPU = ("--device", "cpu", *SMALL)
COLUMNS = 10


@pytest.fixture
def command(capsys):
    return bench_tools.runner(bench, capsys)


@pytest.fixture
def planted():
    """Until the test is over, what is registered as "planted" is an algorithm."""
    yield
    collectives.ALGORITHMS.pop("planted", None)


def table(out):
    """Return the rows as lists of cells; names may contain a space."""
    names = sorted([*collectives.ALGORITHMS, "mxnet device", "mxnet local", "numpy"], key=len)
    rows = []
    for line in out:
        name = next((n for n in reversed(names) if f" {n} " in line), None)
        if name is not None and line.split()[0].isdigit():
            before, _, after = line.partition(f" {name} ")
            rows.append([*before.split(), name, *after.split()])
    return rows


def test_busbw_is_algbw_times_2_k_minus_1_over_k():
    for k in (1, 2, 4, 8):
        row = Result("a", 4_000_000, 1_000_000, k, Samples((0.002,)))
        assert row.algbw == pytest.approx(2.0)
        assert row.busbw == pytest.approx(2.0 * 2 * (k - 1) / k)


@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_the_payload_s_sums_are_exact_and_devices_differ(dtype, k):
    for size in (1, 2, 6, 1021, 4096):
        values = bench.payload(k, size, np.dtype(dtype))
        assert [(value.dtype, value.shape) for value in values] == [(np.dtype(dtype), (size,))] * k
        total = sum(value.astype(object) for value in values)
        np.testing.assert_array_equal(np.sum(values, axis=0, dtype=dtype), total)
        assert not any(np.array_equal(values[0], value) for value in values[1:])


def test_every_cell_of_a_float32_payload_is_unique():
    cells = np.concatenate(bench.payload(4, 4096, np.dtype("float32")))
    assert len(np.unique(cells)) == 4 * 4096


def test_numpy_sums_large_arrays_on_threads(monkeypatch):
    monkeypatch.setattr(bench, "NUMPY_MIN_BYTES", 0)
    monkeypatch.setattr(bench, "NUMPY_THREADS", 2)
    monkeypatch.setattr(bench, "NUMPY_BLOCK", 100)
    setting = Setting([mx.cpu(i) for i in range(3)], rounds=1)
    wrong = {row.name: row.wrong for row in bench.measure_size([], setting, 1001)}
    assert wrong == {"mxnet device": 0, "mxnet local": 0, "numpy": 0}


def test_timed_payloads_do_not_overflow(monkeypatch):
    setting, made = Setting([mx.cpu(0), mx.cpu(1)], dtype="float16", rounds=40, warmup=0), []
    candidates = bench.candidates
    monkeypatch.setattr(
        bench, "candidates", lambda *given: made.extend(given[0]) or candidates(*given)
    )
    bench.measure_size(["star"], setting, 64)
    assert len(made) == 2 and not any(array.asnumpy().any() for array in made)


def test_a_row_for_every_size_and_candidate_is_printed_and_kept_as_json(command, tmp_path):
    path = tmp_path / "bench.json"
    code, out, err = command(*ON_CPU, "--json", path)
    assert (code, err) == (0, [])
    rows = table(out)
    names = [*collectives.usable([mx.cpu(0)]), "mxnet device", "mxnet local", "numpy"]
    assert [row[:3] for row in rows] == [
        [num_bytes, elements, name]
        for num_bytes, elements in (("4096", "1024"), ("8192", "2048"))
        for name in names
    ]
    for row in rows:
        assert len(row) == COLUMNS and row[-1] == "0"
        assert row[5] == row[6]  # algbw is busbw for two devices
        assert row[7] == "1.00" or row[2] != "mxnet device"
        assert row[8] == "1.00" or row[2] != "numpy"
    result = json.loads(path.read_text())
    assert result["machine"]["cores"] >= 1
    assert result["arguments"]["min_bytes"] == 4096
    assert [(str(r["num_bytes"]), r["name"]) for r in result["rows"]] == [
        (row[0], row[2]) for row in rows
    ]
    for row in result["rows"]:
        assert len(row["seconds"]) == 2
        assert row["median_seconds"] == pytest.approx(np.median(row["seconds"]))
        assert row["algbw"] == pytest.approx(row["num_bytes"] / row["median_seconds"] / 1e9)
        assert row["wrong"] == 0


def test_an_algorithm_that_omits_a_device_is_reported(command, planted):
    registry.register("planted")(lambda num_devices: star.plan(num_devices)[:-1])
    code, out, err = command(*ON_CPU, "--algorithms", "star,planted", "--num-gpus", 3)
    assert code == 1
    wrong = {row[2]: int(row[-1]) for row in table(out) if row[0] == "4096"}
    assert wrong == {"star": 0, "planted": 1024, "mxnet device": 0, "mxnet local": 0, "numpy": 0}
    assert "planted at 4096 bytes, planted at 8192 bytes" in err[-1]


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_an_algorithm_that_misplaces_chunks_is_reported(command, planted, dtype):
    @registry.register_executor("planted")
    def rotate(lists, op, accumulate):
        collectives.named("host").run(lists, op, accumulate)
        for data in lists:
            for array in data:
                half = array.size // 2
                array[:] = mx.nd.concat(array[half:], array[:half], dim=0)

    code, out, _ = command(*ON_CPU, "--algorithms", "planted", "--dtype", dtype)
    assert code == 1
    wrong = {row[2] for row in table(out) if int(row[-1])}
    assert wrong == {"planted"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--min-bytes", "many"), "'many'"),
        (("--min-bytes", "16K"), "max_bytes=8192, got 16384"),
        (("--min-bytes", "2"), "at least 4, one float32"),
        (("--max-bytes", "8G"), "max_bytes must be less than 8589934592, got 8589934592"),
        (("--factor", "1"), "--factor: must be a whole number of at least 2, got '1'"),
        (("--warmup", "-1"), "--warmup"),
        (("--num-gpus", "0"), "num_gpus must be at least 1, got 0"),
        (("--algorithms", "ring,nope"), "'nope'; choose from star, "),
        (("--algorithms", "nccl"), "algorithm='nccl'"),
        (("--json", "/nowhere/to/be/found.json"), "cannot write /nowhere/to/be/found.json"),
    ],
)
def test_a_bad_request_is_one_line_and_exit_code_2(command, arguments, words):
    bench_tools.expect_one_line(command(*ON_CPU, *arguments), words)


def test_ctrl_c_keeps_the_rows_so_far(command, monkeypatch, tmp_path):
    measure_size = bench.measure_size

    def interrupted_at_the_second(algorithms, setting, size):
        if size > 1024:
            raise KeyboardInterrupt
        return measure_size(algorithms, setting, size)

    monkeypatch.setattr(bench, "measure_size", interrupted_at_the_second)
    path = tmp_path / "bench.json"
    code, out, err = command(*ON_CPU, "--algorithms", "host", "--json", path)
    assert code == 130 and "interrupted" in err[-1]
    assert [row[0] for row in table(out)] == ["4096"] * 4
    assert len(json.loads(path.read_text())["rows"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("program", [[str(SCRIPT)], ["-m", "gluonpar", "bench"]])
def test_it_runs_as_a_script_and_as_a_command(program):
    done = subprocess.run(
        [sys.executable, *program, *ON_CPU, "--algorithms", "ring"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(table(done.stdout.splitlines())) == 2 * 4
