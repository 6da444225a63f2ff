"""Nothing that a file holds is run as code: no module here unpickles, or evaluates text.

A pickle runs what it says when it is loaded, so whoever can write a checkpoint could run anything.
Files are read by gluonpar.checkpoint.archive, which parses JSON and numbers, and by
gluonpar.training.data.idx, which reads bytes.

One exception: the processes of one job (gluonpar.cluster) send each other Python's objects, which
mpi4py pickles. They are started together by one mpirun from the same program, and whoever can write
to their connections can start programs as that user anyway. No file comes that way.
"""

from __future__ import annotations

import ast
import pathlib

import pytest

import gluonpar

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = pathlib.Path(gluonpar.__file__).parent
FOLDERS = (PACKAGE, ROOT / "scripts", ROOT / "tools", ROOT / "examples")
FILES = {
    path.relative_to(folder.parent).as_posix(): path
    for folder in FOLDERS
    for path in sorted(folder.rglob("*.py"))
}
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EVALUATES = {"eval", "exec", "compile", "__import__", "input"}
# By the last name of what is called. Trainer.load_states of stock Gluon and Updater.set_states
# unpickle; gluonpar.Trainer has its own load_states. np.load does unless it is told not to, and
# pandas and torch have loaders that do.
UNPICKLES = {"set_states", "read_pickle", "load_optimizer_states", "unpickle"}

# mx.nd.load does not unpickle, but parses in C++ what a file says about itself. gluonpar reads only
# what it has written in the same call, under a name nobody else knows of: whether it is whole.
MAY_LOAD_MXNETS = {"gluonpar/checkpoint/params_file.py"}


def name_of(node):
    """ "np.random.load" for the function that is called; "" for what has no name."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def violations(source, path="gluonpar/x.py"):
    """What of this is in a module's source, line by line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
            names |= {alias.name for alias in node.names} & {"load_states"}
        elif isinstance(node, ast.Call):
            found += [f"{path}:{node.lineno}: {what}" for what in wrong_call(node, path)]
            continue
        else:
            continue
        found += [f"{path}:{node.lineno}: imports {name}" for name in sorted(names & MODULES)]
    return found


def wrong_call(node, path):
    name = name_of(node.func)
    owner, _, last = name.rpartition(".")
    arguments = {word.arg: getattr(word.value, "value", word.value) for word in node.keywords}
    if arguments.get("allow_pickle", False) is not False:
        yield f"{name} allows pickles"
    elif owner in ("np", "numpy", "onp") and last == "load" and "allow_pickle" not in arguments:
        yield f"{name} without allow_pickle=False"
    if name in EVALUATES:
        yield f"{name} runs text"
    if last in UNPICKLES:
        yield f"{name} unpickles"
    if owner in ("mx.nd", "nd", "mx.npx", "npx", "mx.ndarray") and last == "load":
        if path not in MAY_LOAD_MXNETS:
            yield f"{name} of a file that may be somebody else's"
    if name in ("gluon.Trainer.load_states", "mx.gluon.Trainer.load_states", "super.load_states"):
        yield f"{name} is the stock one, which unpickles"


@pytest.mark.parametrize("name", FILES)
def test_no_module_unpickles_or_evaluates(name):
    assert violations(FILES[name].read_text("utf-8"), name) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, dill as d",
        "from pickle import loads",
        "from joblib.numpy_pickle import load",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "numpy.load(path, None, False)",
        "read(path, allow_pickle=flag)",
        "updater.set_states(text)",
        "mx.nd.load(path)",
        "nd.load(path)",
        "gluon.Trainer.load_states(trainer, path)",
        "eval(text)",
        "exec(text)",
        "__import__(name)",
    ],
)
def test_what_would_unpickle_is_seen(source):
    assert len(violations(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import json, numpy",
        "np.load(path, allow_pickle=False)",
        "json.loads(text)",
        "trainer.load_states(path)",
        "data.load(name)",
        "re.compile(text)",
    ],
)
def test_what_does_not_is_let_pass(source):
    assert violations(source) == []


def test_ours_is_not_the_stock_load_states():
    """gluonpar.Trainer is a gluon.Trainer, whose load_states unpickles."""
    from mxnet import gluon

    assert gluonpar.Trainer.load_states is not gluon.Trainer.load_states
    assert gluonpar.Trainer.save_states is not gluon.Trainer.save_states
    stores = ast.parse((PACKAGE / "kvstore.py").read_text("utf-8"))
    refused = [n for n in ast.walk(stores) if getattr(n, "name", "") == "load_optimizer_states"]
    assert all(isinstance(node.body[-1], ast.Raise) for node in refused)
