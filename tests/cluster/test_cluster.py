"""Several processes under a real mpirun, on this machine, train as one and end as one."""

import concurrent.futures
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time

import cluster_rank
import numpy as np
import pytest
from mpi_jobs import HERE, QUICK, RANK, TRAIN, line_of, mpirun, needs_mpi, succeed
from processes import runs

from gluonpar import cluster
from gluonpar.cluster import ending, exchange, launcher
from gluonpar.cluster.judge import Judge, Report
from gluonpar.cluster.wire import Line, addresses, call, listen
from gluonpar.cluster.world import timeout_seconds
from gluonpar.collectives import partition
from gluonpar.training.ranks import share_of_batch

SECONDS = 6  # GLUONPAR_TIMEOUT of the jobs in which something goes wrong


@pytest.fixture(scope="module")
def reference():
    """What one process with so many devices trains."""
    found = {}

    def of(num_devices):
        if num_devices not in found:
            found[num_devices] = cluster_rank.trained(num_devices)
        return found[num_devices]

    return of


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_p_processes_with_k_devices_train_as_one_process_with_p_times_k(ranks, tmp_path, reference):
    """Collectives, uneven tails and batches with fewer samples than ranks are in the job too."""
    succeed(mpirun((ranks, [*RANK, "as_one", str(tmp_path)]), GLUONPAR_CHECK="1"))
    for num_devices in (1, 2, 3):
        got = np.load(tmp_path / f"{num_devices}.npz")
        for name, arrays in reference(ranks * num_devices).items():
            for i, want in enumerate(arrays):
                # float32 sums in another order, through three steps; Adam divides by small numbers
                close = {"rtol": 1e-5, "atol": 5e-7 if name == "adam" else 1e-7}
                np.testing.assert_allclose(got[f"{name}{i}"], want, **close)


@needs_mpi
def test_one_process_under_mpirun_imports_no_mpi_and_gives_the_same_bits(tmp_path, reference):
    succeed(mpirun((1, [*RANK, "alone", str(tmp_path)])))
    want = b"".join(array.tobytes() for arrays in reference(2).values() for array in arrays)
    assert (tmp_path / "alone").read_bytes() == want


@needs_mpi
def test_only_rank_zero_prints_and_saves(tmp_path):
    command = [*TRAIN, "--num-gpus", "2", *QUICK, "--epochs", "1"]
    out, err = succeed(mpirun((2, [*command, "--save-dir", str(tmp_path), "--save-every", "1"])))
    assert out.count("epoch 1,") == 1 and "processes: 2" in out and not err
    assert [path.name for path in tmp_path.glob("*.params")] == ["lenet-epoch-0001.params"]


# What happens to whom, what the one line about it says, and about whom.
FAULTS = {
    "kill 1": (["kill", "1"], "died without a word", 1),
    "kill 0": (["kill", "0"], "died without a word", 0),
    "raise 1": (["raise", "1"], "failed: KeyError: 'the cat'", 1),
    "stop 1": (["stop", "1"], "has been silent for", 1),
    "stop 0": (["stop", "0"], "has been silent for", 0),
    "hang 1": (["hang", "1"], "hangs: it has not come", 1),
    "leave 1": (["leave", "1"], "has ended before operation 12", 1),
}


@pytest.fixture(scope="module")
def faulty():
    """All jobs in which something goes wrong, side by side; see :func:`ended`."""
    watched = {
        name: mpirun((3 if name == "stop 0" else 2, [*RANK, *what]), GLUONPAR_TIMEOUT=str(SECONDS))
        for name, (what, _, _) in FAULTS.items()
    }
    with concurrent.futures.ThreadPoolExecutor(len(watched)) as pool:
        return dict(zip(watched, pool.map(ended, watched.values())))


def ended(job):
    """Wait for it: (exit code, seconds since something went wrong, out, err)."""
    out, err = job.communicate(timeout=200)
    now = time.time()
    return job.returncode, now - float(re.search(r"^now (.*)", out, re.M)[1]), out, err


def pids(out):
    return [int(pid) for pid in re.findall(r"pid (\d+)", out)]


@needs_mpi
@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_is_lost_ends_the_job_with_one_line_that_names_it(name, faulty):
    code, seconds, out, err = faulty[name]
    _, words, rank = FAULTS[name]
    lines = [line for line in err.splitlines() if line.startswith("gluonpar: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"gluonpar: rank {rank} (pid ") and words in lines[0]
    assert lines[0].endswith("; the job ends")
    assert code != 0 and seconds < 30  # seven jobs at once
    assert len(pids(out)) >= 2 and not any(map(runs, pids(out)))


def test_of_the_ranks_of_a_machine_one_speaks():
    token, ask = secrets.token_hex(16), "print(ending.speaks_first(sys.argv[1]))"
    assert ending.speaks_first(token)
    program = [sys.executable, "-c", f"import sys; from gluonpar.cluster import ending; {ask}"]
    for asked, answer in ((token, "False\n"), (f"{token}-of-another-job", "True\n")):
        run = subprocess.run([*program, asked], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
        assert run.stdout == answer


@needs_mpi
@pytest.mark.parametrize("number, fault", [(signal.SIGINT, "go on"), (signal.SIGKILL, "stop")])
def test_whatever_ends_mpirun_ends_all_ranks(number, fault):
    """Also one that is stopped, and so cannot notice anything; Ctrl-C with a line that says so."""
    job = mpirun((2, [*RANK, fault, "1"]))
    out = [line_of(job) for _ in range(3)]
    while not any(line.startswith("now") for line in out):
        out.append(line_of(job))
    job.send_signal(number)
    _, err = job.communicate(timeout=600)
    found = pids("".join(out))
    assert job.returncode != 0 and len(found) == 2
    lines = [line for line in err.splitlines() if line.startswith("gluonpar: ")]
    if number == signal.SIGINT:  # mpirun reads no more of what ranks print when it tells them
        assert len(lines) == 1 and re.match(
            "gluonpar: rank [01] .*Ctrl-C.*; the job ends", lines[0]
        )
    deadline = time.monotonic() + 10
    while any(map(runs, found)) and time.monotonic() < deadline:
        os.sched_yield()
    assert not any(map(runs, found))


@needs_mpi
def test_another_order_of_collectives_is_an_error_if_checked():
    job = mpirun((2, [*RANK, "order", "1"]), GLUONPAR_CHECK="1")
    _, err = job.communicate(timeout=600)
    assert job.returncode != 0
    assert (
        "the ranks differ in operation 12: rank 0: allreduce of 1000 float32; "
        "rank 1: allreduce of 7 float32" in err
    )


@needs_mpi
def test_ranks_with_other_arguments_are_refused_once():
    first, second = ([*TRAIN, "--num-gpus", k, *QUICK] for k in "12")
    second += ["--lr", "0.5"]
    job = mpirun((1, first), (1, second))
    out, err = job.communicate(timeout=600)
    ours = [line for line in err.splitlines() if line.startswith("train_lenet.py: error:")]
    assert job.returncode == 2 and "epoch" not in out
    assert len(ours) == 1
    assert "rank 1 cannot train with the others: " in ours[0]
    assert "lr is 0.5 on rank 1 and 0.2 on rank 0" in ours[0].replace("--lr ", "lr is ")
    assert "number of devices is 2 on rank 1 and 1 on rank 0" in ours[0]


@needs_mpi
def test_what_one_rank_lacks_is_said_once_and_ends_all(tmp_path):
    fine = [*TRAIN, "--num-gpus", "1", *QUICK]
    lacking = [*TRAIN, "--num-gpus", "1", "--device", "cpu", "--data-dir", str(tmp_path)]
    job = mpirun((1, fine), (1, lacking))
    out, err = job.communicate(timeout=600)
    ours = [line for line in err.splitlines() if line.startswith("train_lenet.py: error:")]
    assert job.returncode == 2 and len(ours) == 1 and "rank 1: " in ours[0]
    assert str(tmp_path) in err  # the places that were looked at, a line each


@needs_mpi
@pytest.mark.parametrize("name", ["GLUONPAR_TIMEOUT", "PYTHONPATH"])
def test_what_keeps_all_ranks_from_joining_is_a_line_each_at_most(name, tmp_path):
    (tmp_path / "mpi4py.py").write_text("raise ImportError('it is broken')\n")
    words = {
        "GLUONPAR_TIMEOUT": f"GLUONPAR_TIMEOUT='{tmp_path}' is no time; give seconds, 2 or more",
        "PYTHONPATH": "this process was started by an MPI launcher, and training on several "
        "processes needs mpi4py (it is broken): pip install 'gluonpar[mpi]'",
    }
    job = mpirun((2, [*TRAIN, "--num-gpus", "1", *QUICK]), **{name: str(tmp_path)})
    out, err = job.communicate(timeout=600)
    assert (job.returncode, out.strip()) == (2, "")  # mpirun adds a newline of its own
    ours = [line for line in err.splitlines() if line and not of_mpirun(line)]
    assert set(ours) == {f"train_lenet.py: error: {words[name]}"}, err


def of_mpirun(line):
    return re.match("---|prterun|thus causing|   (Process name|Exit code): ", line)


@needs_mpi
@pytest.mark.parametrize(
    "megabytes, code, words",
    [
        (100, 3, "out of memory: cannot allocate about 350 MB of address space for MPI"),
        (
            600,
            1,
            "ran out of memory: .* for a step of 3000 samples on 1 CPU context",
        ),
        (2200, 1, "ran out of memory: .*(alloc|memory object)"),
    ],
    ids=["for MPI", "for a step", "in a step"],
)
def test_memory_that_one_rank_lacks_is_a_line_and_ends_the_job(megabytes, code, words, tmp_path):
    asked = "import gluonpar; print(open('/proc/self/statm').read().split()[0])"
    pages = subprocess.run([sys.executable, "-c", asked], stdout=subprocess.PIPE, check=True).stdout
    size = int(pages) * resource.getpagesize() // 1024 + megabytes * 1024
    train = [*TRAIN, *QUICK, "--num-gpus", "1", "--limit", "6000", "--batch-size", "6000"]
    train += ["--save-dir", str(tmp_path)]
    job = mpirun((1, train), (1, ["sh", "-c", f'ulimit -v {size}; exec "$@"', "sh", *train]))
    out, err = job.communicate(timeout=200)
    assert job.returncode == code, out + err
    ours = [line for line in err.splitlines() if line and not of_mpirun(line)]
    assert len(ours) == 1 and re.search(words, ours[0]), err
    assert code == 3 or ours[0].startswith("gluonpar: rank 1 (pid ")
    assert list(tmp_path.iterdir()) == []


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
        ({"OMPI_COMM_WORLD_SIZE": "2", "GLUONPAR_CLUSTER_PID": "1"}, False),  # a rank's child
    ],
)
def test_a_job_is_recognised_by_the_environment(environment, several):
    assert launcher.launched(environment) is several


def test_alone_nothing_is_exchanged_and_nothing_is_imported():
    assert (cluster.rank(), cluster.size(), cluster.is_main()) == (0, 1, True)
    assert cluster.gather("x") == ["x"] and cluster.total([2]).tolist() == [2.0]
    assert exchange.Later(3).wait() == 3
    code = (
        "import sys, gluonpar; assert gluonpar.cluster.size() == 1; print('mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("weights", [None, (1.0, 3.0)])
def test_the_ranks_parts_are_the_batch_and_cut_as_inside_a_process(monkeypatch, weights):
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


@pytest.mark.parametrize("text", ["", "soon", "1", "-3", "nan"])
def test_a_timeout_that_is_no_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("GLUONPAR_TIMEOUT", text)
    with pytest.raises(ValueError, match=rf"GLUONPAR_TIMEOUT='{text}' is no time"):
        timeout_seconds()


def judge():
    made = Judge(3, 10, now=0.0)
    for rank in range(3):
        made.hello(rank, "host", 100 + rank, now=0.0)
    return made


def report_all(made, now, *reports):
    for rank, (operation, waiting) in enumerate(reports):
        made.report(rank, Report(operation, f"sum {operation}", waiting, "a.py:1 in f"), now)


def test_ranks_that_come_in_time_are_not_judged():
    made = judge()
    report_all(made, 5.0, (4, 9.0), (3, None), (4, 9.0))
    assert made.verdict(14.9) is None


def test_the_rank_that_is_waited_for_is_named_not_those_that_wait():
    made = judge()
    report_all(made, 5.0, (4, 10.5), (3, None), (4, 10.5))
    assert re.search(r"rank 1 \(pid 101 on host\) hangs.*sum 4.*a\.py:1 in f", made.verdict(5.0))


def test_silence_is_judged_and_that_of_ranks_that_have_left_is_not():
    made = judge()
    report_all(made, 5.0, (4, None), (4, None), (4, None))
    made.report(0, Report(), 15.5)
    made.left(1)
    assert made.verdict(15.5).startswith("rank 2 (pid 102 on host) has been silent")
    made.left(2)
    assert made.verdict(15.5) is None and not made.all_left


def test_the_first_cause_is_the_cause():
    made = judge()
    made.failed(2, "failed: ValueError: x")
    made.lost(1)
    assert made.verdict(0.0) == "rank 2 (pid 102 on host) failed: ValueError: x"


def test_a_rank_that_left_and_is_waited_for_is_judged_at_once_and_else_not():
    made = judge()
    made.left(1)
    made.lost(1)
    report_all(made, 1.0, (4, None), (4, None), (4, None))
    assert made.verdict(1.0) is None
    report_all(made, 1.0, (5, 0.1), (4, None), (4, None))
    assert "rank 1 (pid 101 on host) has ended before operation 5" in made.verdict(1.0)


def test_an_operation_that_all_are_in_and_that_does_not_end_is_judged():
    made = judge()
    report_all(made, 1.0, (5, 10.1), (5, 9.0), (5, 9.0))
    assert "has been in operation 5 for 10 s (rank 0: sum 5; rank 1: sum 5" in made.verdict(1.0)


def test_a_line_carries_messages_whole_and_tells_the_end():
    with listen(1) as listener:
        answered = []

        def answer():
            line = Line(listener.accept()[0])
            while not answered:
                answered.extend(line.receive())
            line.send(welcome=True)
            line.send(text="x" * 5000, number=1)
            line.socket.close()

        thread = threading.Thread(target=answer)
        thread.start()
        line = call(["127.0.0.1"], listener.getsockname()[1], {"rank": 1, "token": "t"})
        thread.join()
        assert answered == [{"rank": 1, "token": "t"}]
        line.socket.close()
    assert "127.0.0.1" == addresses()[-1]


def test_nobody_at_the_address_is_an_error_that_says_what_was_tried():
    with listen(1) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        ConnectionError, match=rf"rank 3 cannot reach rank 0 .*{port}.*127\.0\.0\.1"
    ):
        call(["127.0.0.1"], port, {"rank": 3})
