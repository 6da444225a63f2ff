"""Run the operator sweep in child processes, which its cases may end."""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

PROGRAM = Path(__file__).with_name("operator_sweep.py")
SECONDS = 60  # for one case, which takes milliseconds; a process that crashes may hang
TOGETHER = 400  # cases in one process
JOBS = 2


def sweep(keys: list) -> dict:
    """Train all cases; return of each that is not as on one device what is wrong."""
    groups = [keys[i : i + TOGETHER] for i in range(0, len(keys), TOGETHER)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        found = pool.map(_results, groups)
    return {key: wrong for results in found for key, wrong in results.items() if wrong}


def executed(keys: list) -> set:
    """The names of all operators that run when stock MXNet trains these cases."""
    with tempfile.TemporaryFile("w+") as errors, _start(["profile"], errors) as process:
        output, _ = process.communicate(_lines(keys))
        errors.seek(0)
        assert process.returncode == 0, errors.read()
    return set(json.loads(output.splitlines()[-1]))


def _results(keys):
    """Train the cases in as many processes as it takes: another one after each that crashes."""
    results = {}
    while len(results) < len(keys):
        results.update(_of_process([key for key in keys if key not in results]))
    return results


def _of_process(keys):
    """What one process found until its end, which is the result of the case it was at."""
    results = {}
    with tempfile.TemporaryFile("w+") as errors, _start([], errors) as process:
        threading.Thread(target=_feed, args=(process, keys), daemon=True).start()
        for line in iter(lambda: _line(process), ""):
            if line.startswith("{"):
                ended = json.loads(line)
                results[tuple(ended["case"])] = ended["wrong"]
        code = process.wait()
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:]
    if len(results) < len(keys):
        results[keys[len(results)]] = " ".join([f"the process ended with {code}:", *last])
    return results


def _start(arguments, errors):
    places = os.pathsep.join([str(PROGRAM.parents[2]), str(PROGRAM.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    return subprocess.Popen(
        [sys.executable, PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )


def _line(process):
    """The next line of its output; a process that stands still is killed."""
    watch = threading.Timer(SECONDS, process.kill)
    watch.start()
    line = process.stdout.readline()
    watch.cancel()
    return line


def _lines(keys):
    return "\n".join(map(json.dumps, keys)) + "\n"


def _feed(process, keys):
    try:
        process.stdin.write(_lines(keys))
        process.stdin.close()
    except OSError:  # the process has crashed; its results end early, which _of_process reports
        pass
