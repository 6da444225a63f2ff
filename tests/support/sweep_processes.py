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
SECONDS = 20  # for one case, which takes milliseconds
TOGETHER = 60  # cases in one process
JOBS = 2


def sweep(keys):
    """Train all cases, and return per case that is not as it should be what is wrong."""
    size = max(1, min(TOGETHER * 6, -(-len(keys) // JOBS)))
    groups = [keys[i : i + size] for i in range(0, len(keys), size)]
    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        found = pool.map(_run, groups)
    return {key: wrong for group in found for key, wrong in group.items() if wrong}


def _run(keys):
    """Train the cases in as many processes as it takes: one more after each that ends early."""
    results = {}
    while len(results) < len(keys):
        left = [key for key in keys if key not in results]
        results.update(_process(left))
    return results


def _process(keys):
    root = PROGRAM.parents[2]
    places = os.pathsep.join([str(root), str(PROGRAM.parent)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": places}
    with tempfile.TemporaryFile() as errors, subprocess.Popen(
        [sys.executable, PROGRAM],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
    ) as process:  # fmt: skip
        results, begun = {}, None
        threading.Thread(target=_feed, args=(process, keys), daemon=True).start()
        while True:
            watch = threading.Timer(SECONDS, process.kill)
            watch.start()
            line = process.stdout.readline()
            watch.cancel()
            if not line: break
            if not line.startswith("{"): continue
            line = json.loads(line)
            if "begins" in line:
                begun = tuple(line["begins"])
            else:
                results[begun], begun = line["wrong"], None
        code = process.wait()
        errors.seek(0)
        last = errors.read().decode().strip().splitlines()[-1:]
    if begun or len(results) < len(keys):
        results[begun or keys[len(results)]] = " ".join([f"the process ended: {code}", *last])
    return results


def _feed(process, keys):
    try:
        process.stdin.write("\n".join(map(json.dumps, keys)) + "\n")
        process.stdin.close()
    except OSError:
        pass
