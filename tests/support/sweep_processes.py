"""Run the operator sweep in child processes, which its cases may end."""

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("operator_sweep.py")
SECONDS = 600  # for one process, whose cases take milliseconds; one that crashes may hang
TOGETHER = 400  # cases in one process
JOBS = 2


def sweep(keys: list) -> dict:
    """Train all cases; return of each that is not as on one device what is wrong."""
    groups = [keys[i : i + TOGETHER] for i in range(0, len(keys), TOGETHER)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        found = pool.map(_results, groups)
    return {key: wrong for results in found for key, wrong in results.items() if wrong}


def _results(keys):
    """Train the cases in as many processes as it takes: another one after each that crashes."""
    results = {}
    while len(results) < len(keys):
        results.update(_of_process([key for key in keys if key not in results]))
    return results


def _of_process(keys):
    """What one process found until its end, which is the result of the case it was at."""
    try:
        done = _run(keys)
        output, end = done.stdout, f"ended with {done.returncode}: {done.stderr[-500:]}"
    except subprocess.TimeoutExpired as stopped:
        output, end = stopped.stdout.decode(), "stood still"
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    results = {tuple(one["case"]): one["wrong"] for one in found}
    if len(results) < len(keys):
        results[keys[len(results)]] = f"the process {end}"
    return results


def _run(keys):
    places = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent)])
    return subprocess.run(
        [sys.executable, PROGRAM],
        input="".join(f"{json.dumps(key)}\n" for key in keys),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
