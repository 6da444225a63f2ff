#!/usr/bin/env python
"""Train the book's LeNet on Fashion-MNIST, on several devices by hand-written data parallelism.

python scripts/train_lenet.py --num-gpus 2
python scripts/train_lenet.py --num-gpus 4 --device cpu --epochs 1 --limit 6000
python scripts/train_lenet.py --gpus 0,2 --batch-size 512 --plot lenet.png
"""

import sys

try:
    from gluonpar import __main__ as command
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"train_lenet.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(command.start("train", sys.argv[1:], "train_lenet.py", "lenet"))
