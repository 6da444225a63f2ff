"""Checkpoints that a test has changed, under a correct checksum."""

from gluonpar.checkpoint import sealed_npz


def set_in_header(path, keys, value):
    """Set one value of the header of a file, ``header[keys[0]][keys[1]]...``."""
    header, arrays = sealed_npz.unpack(path.read_bytes())
    inner = header
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_bytes(sealed_npz.pack(header, arrays))
