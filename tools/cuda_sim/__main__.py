"""Run a command on simulated GPUs; their libraries are built first, if they are not up to date.

    python tools/cuda_sim python scripts/train_lenet.py --num-gpus 2
    python tools/cuda_sim --num-gpus 9 --kernels python -m pytest --device gpu-sim tests/step

The Python that runs this must have mxnet-cu112 1.9.1; the command runs in its environment.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from cuda_sim import build, environment  # noqa: E402 - now that it is on the path


def main() -> int:
    """Build, and replace this process by the command."""
    summary, _, details = (__doc__ or "").partition("\n")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python tools/cuda_sim", description=summary, epilog=details, formatter_class=form
    )
    parser.add_argument("--num-gpus", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--bytes", type=int, help="memory of each (default: 4 GiB)")
    text = "compile all kernels of the tests first; others are compiled when launched"
    parser.add_argument("--kernels", action="store_true", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run")
    options = parser.parse_args()
    if not options.command:
        parser.error("no command was given")
    try:
        build.build(kernels=options.kernels)
    except build.BuildError as error:
        print(f"python tools/cuda_sim: error: {error}", file=sys.stderr)
        return 2
    limits = {} if options.bytes is None else {"bytes": options.bytes}
    variables = environment(options.num_gpus, **limits)
    os.execvpe(options.command[0], options.command, {**os.environ, **variables})


if __name__ == "__main__":
    sys.exit(main())
