"""gluonpar.Trainer trains every operator of MXNet as gluon.Trainer on one device.

Each operator alone writes the gradients of a Block's Parameters, whatever way it has of doing it:
operators in C++ and of oneDNN, written to and added to, called one by one and from static graphs.
They run in processes of their own, which some of them may end.
"""

import concurrent.futures
import json
import pathlib
import subprocess

import operator_table
import pytest
from processes import end

PROGRAM = pathlib.Path(operator_table.__file__).with_name("operator_sweep.py")
SECONDS = 600  # for one process, whose cases take milliseconds; one that crashes may hang
TOGETHER = 400  # cases in one process
JOBS = 2
pytestmark = pytest.mark.cpu("the sweep compares with MXNet on CPU contexts")


@pytest.mark.slow
def test_every_operator_is_trained_as_on_one_device():
    """On one device to the bit, on two to rounding."""
    keys = operator_table.keys()
    groups = [keys[i : i + TOGETHER] for i in range(0, len(keys), TOGETHER)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        found = [each for results in pool.map(trained, groups) for each in results.items()]
    assert {key for key, _ in found} == {*keys}
    wrong = [f"{' '.join(map(str, key))}: {wrong}" for key, wrong in found if wrong]
    assert not wrong, "\n".join(wrong)


def trained(keys):
    """Train the cases in as many processes as it takes: another one after each that crashes."""
    results = {}
    while len(results) < len(keys):
        results.update(trained_by_one([key for key in keys if key not in results]))
    return results


def trained_by_one(keys):
    """What one process found until its end, which is the result of the case it was at."""
    try:
        text = "".join(f"{json.dumps(key)}\n" for key in keys)
        done = end(PROGRAM, stdin=text, seconds=SECONDS, OMP_NUM_THREADS="1")
        output, how = done.stdout, f"ended with {done.returncode}: {done.stderr[-500:]}"
    except subprocess.TimeoutExpired as stopped:
        output, how = stopped.stdout.decode(), "stood still"
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    results = {tuple(one["case"]): one["wrong"] for one in found}
    if len(results) < len(keys):
        results[keys[len(results)]] = f"the process {how}"
    return results
