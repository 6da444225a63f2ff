"""What importing gluonpar does to a process, and what it says where it cannot."""

import os
import pathlib
import subprocess
import sys

import pytest

from gluonpar import cuda, runtime

REPOSITORY = pathlib.Path(__file__).parent.parent


def python(program, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in runtime.SETTINGS}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_workspace_pool_is_set_before_mxnet_runs():
    done = python("import gluonpar, os; print(os.environ['MXNET_CPU_TEMP_COPY'])")
    assert done.stdout == "64\n", done.stderr


def test_what_the_user_set_stays():
    done = python(
        "import gluonpar, os; print(os.environ['MXNET_CPU_TEMP_COPY'])", MXNET_CPU_TEMP_COPY="7"
    )
    assert done.stdout == "7\n", done.stderr


def test_mxnet_imported_first_is_early_enough():
    done = python(
        "import numpy; numpy.bool = bool\nimport mxnet, warnings\nwarnings.simplefilter('error')\n"
        "import gluonpar, os; print(os.environ['MXNET_CPU_TEMP_COPY'])"
    )
    assert done.stdout == "64\n", done.stderr


OPERATORS_FIRST = (
    "import numpy; numpy.bool = bool\nimport mxnet as mx\n"
    "mx.random.uniform(shape=(3,)).wait_to_read()\n"
    "import gluonpar, gluonpar.step\n"
    "a = [mx.nd.ones((1,), ctx=mx.cpu(i)) for i in range(2)]\n"
    "gluonpar.allreduce(a)\nprint(a[1].asscalar())"
)


def test_operators_first_still_works_and_says_once_what_came_too_late():
    done = python(OPERATORS_FIRST)
    assert done.stdout == "2.0\n"
    assert done.stderr.count("too late for MXNET_CPU_TEMP_COPY=64") == 1


def test_nothing_is_said_where_the_user_has_set_it_all():
    done = python(OPERATORS_FIRST, MXNET_CPU_TEMP_COPY="64")
    assert (done.stdout, done.stderr) == ("2.0\n", "")


def site(tmp_path, *wheels, body=""):
    """A folder with a stand-in for MXNet: the package, and each wheel's metadata."""
    if wheels:
        package = tmp_path / "mxnet"
        package.mkdir()
        (package / "__init__.py").write_text(body)
    for wheel in wheels:
        (tmp_path / f"{wheel}-1.9.1.dist-info").mkdir()
    return tmp_path


def imported(site_folder):
    """Import gluonpar where MXNet can only come from ``site_folder``."""
    program = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mxnet':\n"
        "            import importlib.machinery\n"
        "            found = importlib.machinery.PathFinder.find_spec(name, [sys.argv[1]])\n"
        "            if found is None: raise ModuleNotFoundError('no mxnet', name='mxnet')\n"
        "            return found\n"
        "sys.meta_path.insert(0, Hide())\n"
        "try:\n    import gluonpar\nexcept ImportError as error:\n    print(error)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(site_folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_no_mxnet(monkeypatch):
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"finds none in .*; install one of the two: pip install"):
        runtime.start()


def test_both_wheels(tmp_path):
    message = imported(site(tmp_path, "mxnet", "mxnet_cu112")).stdout
    assert f"mxnet and mxnet-cu112 are both installed in {tmp_path}" in message
    assert "pip uninstall -y mxnet mxnet-cu112" in message


def test_mxnet_cu112_without_a_driver(tmp_path):
    body = "raise OSError('libcuda.so.1: cannot open shared object file: No such file')"
    message = imported(site(tmp_path, "mxnet_cu112", body=body)).stdout
    assert "mxnet-cu112 cannot be loaded: libcuda.so.1: cannot open shared object" in message
    assert "libcuda.so.1 is NVIDIA's driver" in message
    assert "pip uninstall -y mxnet-cu112, then pip install 'gluonpar[cpu]'" in message


def test_no_openmp_library(tmp_path):
    body = "raise OSError('libgomp.so.1: cannot open shared object file')"
    assert "apt-get install libgomp1" in imported(site(tmp_path, "mxnet", body=body)).stdout


def test_no_distutils(tmp_path):
    body = "raise ModuleNotFoundError(\"No module named 'distutils'\", name='distutils')"
    assert "pip install setuptools" in imported(site(tmp_path, "mxnet", body=body)).stdout


def test_cuda_libraries_are_loaded_in_order_from_where_pypi_puts_them(tmp_path, monkeypatch):
    for name in reversed(cuda.LIBRARIES):
        folder = tmp_path / "nvidia" / name.split(".")[0] / "lib"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"")
    loaded = []
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    found = cuda.load_libraries(tmp_path)
    assert [path.name for path in found] == list(cuda.LIBRARIES)
    assert loaded == [(str(path), cuda.ctypes.RTLD_GLOBAL) for path in found]


def test_the_systems_cuda_libraries_come_first_if_the_user_says_so(tmp_path, monkeypatch):
    """The system has the first and the last library; PyPI's wheels have the first two."""
    ours = {}
    for name in cuda.LIBRARIES[:2]:
        ours[name] = tmp_path / "nvidia" / name.split(".")[0] / "lib" / name
        ours[name].parent.mkdir(parents=True)
        ours[name].write_bytes(b"")
    on_system, loaded = {cuda.LIBRARIES[0], cuda.LIBRARIES[-1]}, []

    def load(path, mode):
        if "/" not in path and path not in on_system:
            raise OSError(f"{path}: cannot open shared object file")
        loaded.append(path)

    monkeypatch.setattr(cuda.ctypes, "CDLL", load)
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    expected = [cuda.LIBRARIES[0], str(ours[cuda.LIBRARIES[1]]), cuda.LIBRARIES[-1]]
    assert list(map(str, cuda.load_libraries(tmp_path))) == expected
    assert loaded == expected


@pytest.mark.parametrize("choice", ["", "pypi"])
def test_pypis_cuda_libraries_come_first_otherwise(choice, monkeypatch):
    monkeypatch.setenv("GLUONPAR_CUDA", choice)
    assert cuda.preferred() == "pypi"


def test_a_choice_of_cuda_that_there_is_not_is_an_error(monkeypatch):
    monkeypatch.setenv("GLUONPAR_CUDA", "sytem")
    with pytest.raises(ValueError, match="GLUONPAR_CUDA=sytem is none of pypi, system; set one"):
        cuda.load_libraries()


def test_without_pypis_cuda_libraries_nothing_is_loaded(tmp_path):
    assert cuda.load_libraries(tmp_path) == []


def test_importing_brings_neither_plots_nor_progress_bars_nor_the_book():
    program = (
        "import sys, gluonpar; print(*sorted(m for m in ('tqdm', 'matplotlib', 'd2l', 'mpi4py')"
        "if m in sys.modules))"
    )
    assert python(program).stdout == "\n"
