"""Checkpoints and files of optimizer states, to be looked into and changed."""

from gluonpar.checkpoint import npz_file


def read(path):
    """The header and the list of arrays of a file."""
    content = path.read_bytes()
    return npz_file.parsed(content, lambda header, arrays: (header, [*arrays.values()]), path)


def set_in_header(path, keys, value):
    """Set one value of the header of a file, ``header[keys[0]][keys[1]]...``."""
    header, arrays = read(path)
    inner = header
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    npz_file.write(path, header, arrays)
