"""What importing gluonpar does to a process, and the error if MXNet cannot be imported."""

import pytest
from processes import end_python

from gluonpar.install import startup, wheels


def python(program, *arguments, **variables):
    """Run a program as a user's shell does, without the settings of this process's gluonpar."""
    return end_python(program, *arguments, **{**dict.fromkeys(startup.SPIN), **variables})


@pytest.mark.slow
def test_numpy_testing_is_imported_before_mxnet():
    """It may run a program; Python 3.8 and 3.9 fork for that, and MXNet starts its engine."""
    done = python(
        "import sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mxnet': print('numpy.testing' in sys.modules)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import gluonpar"
    )
    # It is looked for twice before it is imported.
    assert done.stdout.split()[-1] == "True" and not done.stderr


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({}, "1000"),
        pytest.param({"GOMP_SPINCOUNT": "7"}, "7", marks=pytest.mark.slow),
        pytest.param({"OMP_WAIT_POLICY": "active"}, "None", marks=pytest.mark.slow),
    ],
)
def test_openmps_threads_soon_sleep_unless_the_user_has_set_how_they_wait(variables, printed):
    done = python("import gluonpar, os; print(os.environ.get('GOMP_SPINCOUNT'))", **variables)
    assert done.stdout == f"{printed}\n", done.stderr


@pytest.mark.slow
def test_importing_loads_neither_plots_nor_progress_bars_nor_the_book():
    done = python(
        "import sys, gluonpar\n"
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
        "import importlib.machinery, sys, sysconfig\n"
        "sysconfig.get_path = lambda name: sys.argv[1]\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mxnet':\n"
        "            found = importlib.machinery.PathFinder.find_spec(name, [sys.argv[1]])\n"
        "            if found is None: raise ModuleNotFoundError('no mxnet', name='mxnet')\n"
        "            return found\n"
        "sys.meta_path.insert(0, Hide())\n"
        "try:\n    import gluonpar\nexcept ImportError as error:\n    print(error)"
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
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"MXNet 1.9.1 .* pip install --no-deps mxnet==1.9.1"):
        startup.start()


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
        startup.start()
