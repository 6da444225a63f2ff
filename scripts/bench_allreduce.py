#!/usr/bin/env python
"""Measure the all-reduce algorithms: `gluonpar bench` as a script.

python scripts/bench_allreduce.py --num-gpus 2
"""

import sys

try:
    from gluonpar import __main__ as command
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"bench_allreduce.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(command.start("bench", sys.argv[1:], "bench_allreduce.py"))
