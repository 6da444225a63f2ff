"""Five scripts in others' styles, as they were and with the changes of docs/programs.md.

``python tests/programs/ports.py NAME before|after FOLDER K`` trains one of tests/programs/ports on
K devices, with small random data, and writes this rank's parameters to FOLDER. Before the changes
Horovod has one process, and so has MXNet's kvstore 'dist'.
"""

import os
import pathlib
import random
import re
import struct
import sys
import types

import numpy as np

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "programs.md"
NAMES = sorted(path.stem for path in (HERE / "ports").glob("*.py"))
PORT = re.compile(
    r"^`tests/programs/ports/(\w+)\.py`: (\d+) lines.*?^```diff\n(.*?)^```$", re.M | re.S
)


def changes():
    """By script, the number of lines that the page says change, and its block of changes."""
    return {name: (int(count), block) for name, count, block in PORT.findall(PAGE.read_text())}


def hunks(block):
    """The places that change, separated by empty lines: lists of lines with ' ', '-' or '+'."""
    return [part.splitlines(keepends=True) for part in re.split(r"^\n", block, flags=re.M)]


def num_changed(block):
    """The lines that change: those that are replaced, left out or added."""
    counts = [[sum(line[0] == sign for line in lines) for sign in "-+"] for lines in hunks(block)]
    return sum(map(max, counts))


def ported(text, block):
    """Return the script with the changes; each must fit in exactly one place."""
    for lines in hunks(block):
        old, new = (
            "".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +")
        )
        if f"\n{text}".count(f"\n{old}") != 1:
            raise ValueError(f"must be in one place:\n{old}")
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


def _pictures(count, shape):
    rng = np.random.RandomState(count)
    labels = (np.arange(count) % 10).astype("int32")
    dark = 20 * labels.reshape((-1,) + (1,) * len(shape))
    return (rng.randint(0, 60, (count, *shape)) + dark).astype("uint8"), labels


def _stand_in(shape):
    from mxnet import gluon, nd, np, util

    def dataset(train=True, transform=None):
        images, labels = _pictures(64 if train else 32, shape)
        array = np.array if util.is_np_array() else nd.array
        made = gluon.data.ArrayDataset(array(images, dtype="uint8"), labels)
        return made.transform(transform) if transform else made

    return dataset


def _write_mnist():
    for part, count in (("train", 64), ("t10k", 32)):
        images, labels = _pictures(count, (28, 28))
        header = struct.pack(">IIII", 2051, count, 28, 28)
        pathlib.Path(f"{part}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 2049, count)
        content = header + labels.astype("uint8").tobytes()
        pathlib.Path(f"{part}-labels-idx1-ubyte").write_bytes(content)


def _one_process_of_horovod():
    from mxnet import gluon

    hvd = types.ModuleType("horovod.mxnet")
    hvd.init, hvd.size, hvd.rank, hvd.local_rank = (lambda: None), (lambda: 1), *[lambda: 0] * 2
    hvd.broadcast_parameters = lambda params, root_rank: None
    hvd.DistributedTrainer = lambda *args: gluon.Trainer(*args, update_on_kvstore=False)
    package = types.ModuleType("horovod")
    package.mxnet = hvd
    sys.modules.update({"horovod": package, "horovod.mxnet": hvd})


def run(name, which, folder, k):
    """Train, and save this rank's parameters; with gluonpar all its devices have the same."""
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"  # where a fixed gamma would decay
    import mxnet as mx
    from mxnet import gluon

    import gluonpar
    from gluonpar import cluster

    rank = cluster.rank()
    folder = pathlib.Path(folder, f"{which}-{k}-{cluster.size()}-{rank}").resolve()
    folder.mkdir()
    text, change = (HERE / "ports" / f"{name}.py").read_text(), changes()[name][1]
    os.chdir(folder)
    _write_mnist()
    gluon.data.vision.CIFAR10 = _stand_in((32, 32, 3))
    gluon.data.vision.FashionMNIST = _stand_in((28, 28, 1))
    if which == "before":
        _one_process_of_horovod()
        create = mx.kv.create
        mx.kv.create = lambda name: create("device" if name == "dist" else name)
        # In gluonpar's, what a sample draws depends on its place in the epoch.
        gluon.data.DataLoader = gluonpar.DataLoader
    # The contexts have their share of the processors from here on, as in compare.py.
    with cluster.local():
        gluonpar.allreduce([mx.nd.zeros((1,), ctx=mx.cpu(i)) for i in range(k)])
    random.seed(rank)  # each rank starts with values of its own
    np.random.seed(rank)
    mx.random.seed(rank)
    sys.argv = [name]
    if name == "image_classification":
        sys.argv += ["--gpus", ",".join(map(str, range(k)))]
    elif (name, which) != ("horovod_mnist", "before"):
        sys.argv += ["--num-gpus", str(k)]
    namespace = {"__name__": "__main__"}
    text = text if which == "before" else ported(text, change)
    exec(compile(text, f"{name} {which}", "exec"), namespace)
    copies = _copies(namespace)
    # Stock's NAG, without its kvstore, may update each copy in another layout.
    differ = any(len({copy.tobytes() for copy in of_param}) > 1 for of_param in copies)
    if which == "after" and differ:
        raise ValueError("devices must have the same parameters")
    np.savez("params.npz", *[of_param[0] for of_param in copies])


def _copies(namespace):
    """Every device's copy of each parameter that is trained."""
    import mxnet as mx

    if "device_params" in namespace:
        return [[copy.asnumpy() for copy in copies] for copies in zip(*namespace["device_params"])]
    found = namespace["model" if "model" in namespace else "net"]
    if isinstance(found, mx.mod.Module):
        return [[copy.asnumpy() for copy in copies] for copies in found._exec_group.param_arrays]
    params = [param for param in found.collect_params().values() if param.grad_req != "null"]
    return [[copy.asnumpy() for copy in param.list_data()] for param in params]


if __name__ == "__main__":
    run(*sys.argv[1:4], int(sys.argv[4]))
