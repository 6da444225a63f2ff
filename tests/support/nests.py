"""Every kind of nest that the arrays of a batch, or of an output, may be in."""

import collections

Pair = collections.namedtuple("Pair", "x y")

# Nests of two arrays.
NESTS = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, 1: b},
    "ordered dict": lambda a, b: collections.OrderedDict([("b", b), ("a", a)]),
    "namedtuple": lambda a, b: Pair(x=a, y=b),
    "deep": lambda a, b: {"p": Pair(a, [b, (a,)]), "q": ({"r": b},)},
}


def leaves(nest):
    """Return the arrays of a nest in order, and its types and keys."""
    if not isinstance(nest, (dict, tuple, list)):
        return [nest], None
    entries = [leaves(value) for value in (nest.values() if isinstance(nest, dict) else nest)]
    keys = tuple(nest) if isinstance(nest, dict) else len(nest)
    return sum((arrays for arrays, _ in entries), []), (type(nest), keys, [k for _, k in entries])
