"""The cards of docs/algorithms.md, and the formulas on them."""

import math
import re
from pathlib import Path

from gluonpar.collectives import ALGORITHMS

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text("utf-8")
CARDS = {
    part.partition("\n")[0]: part
    for part in re.split(r"^## ", TEXT, flags=re.M)
    if part.partition("\n")[0] in ALGORITHMS
}


def rows(text):
    """The rows of all tables in a text: the other cells of each row by its first one."""
    cells = ([c.strip() for c in line.strip("| ").split(" | ")] for line in text.splitlines())
    return {row[0]: row[1:] for row in cells if len(row) > 1}


def formula(name, label, k):
    """The value for k devices of the formula that an algorithm's card gives for ``label``."""
    names = {"K": k, "P": 1 << (k.bit_length() - 1), "ceil": math.ceil, "log2": math.log2}
    names["min"] = min
    return eval(rows(CARDS[name])[label][0].strip("`"), {"__builtins__": {}}, names)
