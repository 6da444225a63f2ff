"""What each room may use, read from the source; the order of the rooms is in pyproject.toml."""

import pathlib
import re

import gluonpar

PACKAGE = pathlib.Path(gluonpar.__file__).parent  # of the checkout, or where it is installed


def test_private_mxnet_interfaces_stay_in_their_rooms():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\b_LIB\b", path.read_text())
    }
    assert {path.split("/")[0] for path in users} <= {"runtime"}
