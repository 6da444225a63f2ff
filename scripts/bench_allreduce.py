#!/usr/bin/env python
"""Measure the all-reduce algorithms: `gluonpar bench` as a script.

python scripts/bench_allreduce.py --num-gpus 2
"""

import sys

try:
    from gluonpar.diagnostics import bench
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"bench_allreduce.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(bench.main())
