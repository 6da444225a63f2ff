"""What importing gluonpar does to a process, and the error if MXNet cannot be imported."""

import pytest

from gluonpar.install import compatibility, startup, wheels
from tests.support.processes import end_python


def python(program, *arguments, **variables):
    """Run a program as a user's shell does, without the settings of this process's gluonpar."""
    return end_python(program, *arguments, **{**dict.fromkeys(startup.SPIN), **variables})


ARGUMENTS = ["gluonpar"], ["gluonpar", "train"], ["bin/gluonpar", "doctor"], ["-m"], ["-c"], []


def test_importing_reads_no_command_line_and_imports_neither_mxnet_nor_numpy():
    for argv in ARGUMENTS:
        done = python(
            f"import sys; sys.argv = {argv}\n"
            "import gluonpar\n"
            "assert {'Trainer', 'cluster'} <= {*dir(gluonpar)}\n"
            "assert not {'mxnet', 'numpy'} & {*sys.modules}\n"
            "import gluonpar.plans, gluonpar.diagnostics.doctor, gluonpar.training.data.dataset\n"
            "print('mxnet' in sys.modules)"
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", ""), argv


# The first thing that a program imports besides gluonpar.
FIRST = {
    "gluonpar first": "import gluonpar, mxnet",
    # The module that lets MXNet be imported, without the rest of gluonpar.
    "mxnet first": (
        f"import runpy\nrunpy.run_path({compatibility.__file__!r})['install']()\n"
        "import mxnet, gluonpar"
    ),
    "a name": "from gluonpar import sgd",
    "an attribute": "import gluonpar; gluonpar.metrics.accuracy",
    "a module": "from gluonpar.runtime import memory",
    "a room": "import gluonpar.collectives, gluonpar.gluon, gluonpar.training.run",
    "models": "import gluonpar.models.lenet",
    "a search": (
        "import gluonpar, importlib.util\n"
        "assert importlib.util.find_spec('gluonpar.gluon')\n"
        "import gluonpar.gluon"
    ),
}


QUICK = "mxnet first", "a name", "a module", "a search"


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(program, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, program in FIRST.items()
    ],
)
def test_whatever_is_imported_first_mxnets_classes_get_what_gluonpar_gives_them(first):
    done = python(
        f"{first}\n"
        "import sys, mxnet as mx, gluonpar\n"
        "net = mx.gluon.nn.Dense(1, in_units=1)\n"
        "net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])\n"
        "trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', kvstore='gluonpar')\n"
        "assert isinstance(trainer, gluonpar.Trainer)\n"
        "from gluonpar.gluon import trainer\n"
        "assert trainer.Trainer is gluonpar.gluon.Trainer is gluonpar.Trainer\n"
        "for name, module in [*sys.modules.items()]:\n"
        "    if name.startswith('gluonpar.'):\n"
        "        assert module.__file__ and module.__loader__.name == name, name\n"
        "print(mx.np.ones(2).sum())"
    )
    assert (done.stdout, done.stderr) == ("2.0\n", "")


@pytest.mark.slow
def test_numpy_testing_is_imported_before_mxnet():
    """It may run a program; Python 3.8 and 3.9 fork for that, and MXNet starts its engine."""
    done = python(
        "import sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mxnet.context': print('numpy.testing' in sys.modules)\n"
        "import gluonpar\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import mxnet"
    )
    assert {*done.stdout.split()} == {"True"} and not done.stderr


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({}, "1000"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, "7", marks=pytest.mark.slow),
        pytest.param({"OMP_WAIT_POLICY": "active"}, "None", marks=pytest.mark.slow),
    ],
)
def test_openmps_threads_soon_sleep_unless_the_user_has_set_how_they_wait(variables, printed):
    done = python(
        "import gluonpar, mxnet, os; print(os.environ.get('GOMP_SPINCOUNT'))", **variables
    )
    assert done.stdout == f"{printed}\n", done.stderr


@pytest.mark.slow
def test_importing_loads_neither_plots_nor_progress_bars_nor_the_book():
    done = python(
        "import sys, gluonpar, mxnet\n"
        "print(*sorted({'tqdm', 'pooch', 'matplotlib', 'd2l', 'mpi4py'} & set(sys.modules)))"
    )
    assert done.stdout == "\n"


def site(folder, *wheels, body=""):
    """Put a stand-in for MXNet into ``folder``: the package, and each wheel's metadata."""
    if wheels:
        (folder / "mxnet").mkdir()
        (folder / "mxnet" / "__init__.py").write_text(body)
    for wheel in wheels:
        (folder / f"{wheel}-1.9.1.dist-info").mkdir()
    return folder


def import_error(folder, **environment):
    """Import gluonpar where MXNet and the CUDA wheels can only come from ``folder``."""
    program = (
        "import sys, sysconfig\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sysconfig.get_path = lambda name: sys.argv[1]\n"
        "import gluonpar\n"
        "try:\n    gluonpar.sgd\nexcept ImportError as error:\n    print(error)"
    )
    done = python(program, folder, **environment)
    assert done.returncode == 0, "the process ended in the loader"
    assert done.stdout.count("\n") == 1
    return done.stdout


ABSENT = "raise OSError('{}: cannot open shared object file')"
BROKEN = {  # __init__.py of the wheel, and words of the message
    ABSENT.format("libcuda.so.1"): f"pip uninstall -y mxnet-cu112, then {wheels.CPU}",
    ABSENT.format("libcudart.so.11.0"): "pip install -e '.[cu112]'",
    ABSENT.format("libgfortran.so.3"): "--force-reinstall",  # MXNet's wheel contains it
    "raise RuntimeError('Not found.\\nCandidates: /a')": "loaded: Not found. Reinstall it",
    "def broken(:": "invalid syntax",
    "import graphviz_is_not_here": "install graphviz_is_not_here",
}


@pytest.mark.slow
@pytest.mark.parametrize("body", BROKEN)
def test_an_mxnet_that_cannot_be_imported_is_one_line_with_the_remedy(body, tmp_path):
    message = import_error(site(tmp_path, "mxnet_cu112", body=body))
    assert message.startswith("mxnet-cu112 cannot be loaded: ") and BROKEN[body] in message


def test_all_of_gccs_libraries_that_do_not_load_are_named_with_their_packages(tmp_path):
    for name in ("libgomp.so.1", "libquadmath.so.0"):
        (tmp_path / name).write_text("not a library\n" * 100)
    body = ABSENT.format("libgomp.so.1")
    message = import_error(site(tmp_path, "mxnet", body=body), LD_LIBRARY_PATH=str(tmp_path))
    assert "apt-get install libgomp1 libquadmath0" in message


def test_no_mxnet(monkeypatch):
    monkeypatch.setattr(wheels, "package", lambda: None)
    with pytest.raises(ImportError, match=r"MXNet 1.9.1 .* pip install --no-deps mxnet==1.9.1"):
        startup.start.__wrapped__()


def test_both_wheels(tmp_path):
    message = import_error(site(tmp_path, "mxnet", "mxnet_cu112"))
    assert f"mxnet and mxnet-cu112 are both installed in {tmp_path}" in message
    assert "pip uninstall -y mxnet mxnet-cu112" in message


def test_packages_whose_names_begin_with_mxnet_are_not_its_wheels(tmp_path, monkeypatch):
    names = ("mxnet", "mxnet_model_server", "mxnet_cu112", "mxnet_to_coreml")
    package = site(tmp_path, *names) / "mxnet"
    monkeypatch.setattr(wheels, "package", lambda: package)
    assert wheels.installed() == ["mxnet", "mxnet-cu112"]


def test_another_machine_is_an_error_at_once(monkeypatch):
    monkeypatch.setattr(startup.platform, "machine", lambda: "aarch64")
    with pytest.raises(ImportError, match="x86-64 machine, got aarch64"):
        startup.start.__wrapped__()
