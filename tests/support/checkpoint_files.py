"""Checkpoints and files of optimizer states, to be looked into and changed."""

import functools
import json
import operator

import numpy as np

from gluonpar.checkpoint import npz_file


def read(path):
    """The header and the list of arrays of a file."""
    header, arrays = npz_file.read(path.read_bytes())
    return header, [*arrays.values()]


def write(path, header, arrays):
    """A file of a header that has numbers for ``arrays``."""
    text = np.frombuffer(json.dumps(header).encode(), "uint8")
    with open(path, "wb") as file:
        np.savez(file, header=text, **{str(i): array for i, array in enumerate(arrays)})


def set_in_header(path, keys, value):
    """Set one value of the header of a file, ``header[keys[0]][keys[1]]...``."""
    header, arrays = read(path)
    whole = [header]
    *outer, last = [0, *keys]
    functools.reduce(operator.getitem, outer, whole)[last] = value
    write(path, *whole, arrays)
