#!/usr/bin/env python
"""Train the book's ResNet-18 on Fashion-MNIST, on several devices, with Gluon and gluonpar.Trainer.

python scripts/train_resnet18.py --num-gpus 2
python scripts/train_resnet18.py --num-gpus 2 --device cpu --epochs 1 --limit 2048 --profile
"""

import sys

try:
    from gluonpar import __main__ as command
except ImportError as error:
    remedy = " (in a clone: pip install -e '.[cpu]')" if error.name == "gluonpar" else ""
    print(f"train_resnet18.py: error: {error}{remedy}", file=sys.stderr)
    sys.exit(2)
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(command.start("train", sys.argv[1:], "train_resnet18.py", "resnet18"))
