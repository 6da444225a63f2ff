"""What dotted names such as ``gluonpar.metrics.LossMeter`` mean."""

import importlib
import types


def resolve(dotted):
    """Return what a dotted name means: import as many parts as are modules, then take attributes.

    Raises ImportError or AttributeError if there is no such thing.
    """
    package, *names = dotted.split(".")
    owner = importlib.import_module(package)
    for name in names:
        if not hasattr(owner, name) and isinstance(owner, types.ModuleType):
            importlib.import_module(f"{owner.__name__}.{name}")
        if not hasattr(owner, name) and name in getattr(owner, "__annotations__", ()):
            return None  # a field without a default value
        owner = getattr(owner, name)
    return owner


def definition(dotted):
    """Return the dotted name under which a module, class or function is defined."""
    thing = resolve(dotted)
    if isinstance(thing, types.ModuleType):
        return thing.__name__
    return f"{thing.__module__}.{thing.__qualname__}" if hasattr(thing, "__qualname__") else dotted
