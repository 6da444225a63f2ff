"""What importing gluonpar does to a process, and what it says where it cannot."""

import os
import pathlib
import subprocess
import sys

import pytest
from libcuda_stub import build_library, cut

from gluonpar.runtime import cuda_libraries, startup, wheels

REPOSITORY = pathlib.Path(__file__).parents[2]


def python(program, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in startup.SETTINGS}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_what_runs_a_program_is_imported_before_mxnet():
    """Python 3.8 and 3.9 fork to run it, and at a fork MXNet starts its engine."""
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


def test_the_workspace_pool_is_set_before_mxnet_runs():
    done = python("import gluonpar, os; print(os.environ['MXNET_CPU_TEMP_COPY'])")
    assert done.stdout == "256\n", done.stderr


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
    assert done.stdout == "256\n", done.stderr


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
    assert done.stderr.count("too late for MXNET_CPU_TEMP_COPY=256") == 1


def test_nothing_is_said_where_the_user_has_set_it_all():
    done = python(OPERATORS_FIRST, MXNET_CPU_TEMP_COPY="256")
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
        timeout=600,
    )


def test_no_mxnet(monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"finds none in .*; install one of the two: pip install"):
        startup.start()


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


BROKEN = {
    "raise RuntimeError('Cannot find the MXNet library.\\nList of candidates:\\n/a')": (
        "mxnet cannot be loaded: Cannot find the MXNet library. Reinstall it: "
        "pip install --force-reinstall --no-deps mxnet==1.9.1."
    ),
    "def broken(:": "mxnet cannot be loaded: invalid syntax (__init__.py, line 1). Reinstall it",
    "import mxnet.ndarray": "No module named 'mxnet.ndarray'. Reinstall it",
    "import graphviz_is_not_here": "Remedy: pip install graphviz_is_not_here.",
}


@pytest.mark.parametrize("body", BROKEN)
def test_a_broken_mxnet_is_named_in_one_line_with_the_remedy(body, tmp_path):
    message = imported(site(tmp_path, "mxnet", body=body)).stdout
    assert message.count("\n") == 1 and BROKEN[body] in message


def test_a_library_of_cuda_that_is_not_installed_is_on_pypi(tmp_path):
    body = "raise OSError('libcudart.so.11.0: cannot open shared object file: No such file')"
    message = imported(site(tmp_path, "mxnet_cu112", body=body)).stdout
    assert "mxnet-cu112 cannot be loaded: libcudart.so.11.0: cannot open" in message
    assert "pip install 'gluonpar[cu112]' brings them" in message


def test_an_mxnet_that_was_cut_off_is_an_error_and_not_the_end_of_the_process(tmp_path):
    folder = site(
        tmp_path, "mxnet", body="import ctypes; ctypes.CDLL(__path__[0] + '/libmxnet.so')"
    )
    library = cut(build_library(folder / "mxnet", "libmxnet.so"))
    done = imported(folder)
    assert done.returncode == 0, "the loader was let near it"
    assert f"{library} is damaged: cut off after" in done.stdout
    assert "pip install --force-reinstall --no-deps mxnet==1.9.1" in done.stdout


def test_packages_whose_names_begin_like_mxnets_are_none_of_its_wheels(tmp_path, monkeypatch):
    names = ("mxnet", "mxnet_model_server", "mxnet_cu112", "mxnet_cu92mkl", "mxnet_to_coreml")
    package = site(tmp_path, *names) / "mxnet"
    monkeypatch.setattr(wheels, "package", lambda: package)
    assert wheels.installed() == ["mxnet", "mxnet-cu112", "mxnet-cu92mkl"]
    monkeypatch.setattr(wheels, "package", lambda: None)
    assert wheels.installed() == []


def test_numpy_2_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(startup.np, "__version__", "2.1.0")
    with pytest.raises(ImportError, match=r"NumPy 2.1.0 is installed in .*pip install 'numpy<2'"):
        startup.start()


# CUDA's libraries


def wheel_library(tmp_path, name):
    """An empty library where PyPI's wheels put it."""
    folder = tmp_path / "nvidia" / name.split(".")[0] / "lib"
    folder.mkdir(parents=True)
    return build_library(folder, name)


@pytest.fixture
def dlopen(monkeypatch):
    """What is loaded, in order; names that the system's loader finds are put into ``.system``."""

    class Recorder(list):
        system = set()

        def __call__(self, path, mode):
            assert mode == cuda_libraries.ctypes.RTLD_GLOBAL
            if "/" not in path and path not in self.system:
                raise OSError(f"{path}: cannot open shared object file: No such file or directory")
            self.append(path)

    recorder = Recorder()
    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", recorder)
    monkeypatch.delenv("GLUONPAR_CUDA", raising=False)
    return recorder


def test_cuda_libraries_are_loaded_in_order_from_where_pypi_puts_them(tmp_path, dlopen):
    paths = {name: wheel_library(tmp_path, name) for name in reversed(cuda_libraries.LIBRARIES)}
    found = cuda_libraries.load_libraries(tmp_path)
    assert found == [paths[name] for name in cuda_libraries.LIBRARIES]
    assert dlopen == [str(path) for path in found]


def test_all_parts_of_cudnn_are_loaded_lest_another_cudnns_are():
    parts = {f"libcudnn_{a}_{b}.so.8" for a in ("ops", "cnn", "adv") for b in ("infer", "train")}
    assert parts == set(
        cuda_libraries.LIBRARIES[cuda_libraries.LIBRARIES.index("libcudnn.so.8") + 1 :]
    )


def test_the_systems_cuda_libraries_come_first_if_the_user_says_so(tmp_path, dlopen, monkeypatch):
    """The system has the first and the last library; PyPI's wheels have the first two."""
    ours = [wheel_library(tmp_path, name) for name in cuda_libraries.LIBRARIES[:2]]
    dlopen.system = {cuda_libraries.LIBRARIES[0], cuda_libraries.LIBRARIES[-1]}
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    expected = [cuda_libraries.LIBRARIES[0], str(ours[1]), cuda_libraries.LIBRARIES[-1]]
    assert list(map(str, cuda_libraries.load_libraries(tmp_path))) == expected
    assert dlopen == expected


def test_a_system_without_cuda_11_is_an_error_if_the_user_asked_for_it(
    tmp_path, dlopen, monkeypatch
):
    wheel_library(tmp_path, cuda_libraries.LIBRARIES[0])
    dlopen.system = set(cuda_libraries.LIBRARIES[1:])
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    with pytest.raises(
        cuda_libraries.CannotLoad, match="finds no libcudart.so.11.0, so no CUDA 11"
    ) as caught:
        cuda_libraries.load_libraries(tmp_path)
    assert "LD_LIBRARY_PATH" in caught.value.remedy and "unset GLUONPAR_CUDA" in caught.value.remedy
    assert dlopen == []


def test_a_system_library_that_does_not_load_is_an_error_and_not_replaced(
    tmp_path, dlopen, monkeypatch
):
    wheel_library(tmp_path, cuda_libraries.LIBRARIES[0])

    def damaged(path, mode):
        raise OSError(f"/usr/local/lib/{path}: file too short")

    monkeypatch.setattr(cuda_libraries.ctypes, "CDLL", damaged)
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    with pytest.raises(
        cuda_libraries.CannotLoad, match="the system's libcudart.so.11.0 .* file too short"
    ):
        cuda_libraries.load_libraries(tmp_path)


def test_a_library_is_whole_unless_its_last_byte_is_missing(tmp_path):
    library = build_library(tmp_path, "libwhole.so")
    assert cuda_libraries.damage(library) == ""
    num_bytes = library.stat().st_size
    cut(library, num_bytes - 1)
    assert (
        cuda_libraries.damage(library)
        == f"cut off after {num_bytes - 1} of at least {num_bytes} bytes"
    )
    for short in (200, 64, 63, 4, 0):
        assert cuda_libraries.damage(cut(library, short))
    library.write_bytes(b"<html>404 Not Found</html>" * 20)
    assert "no shared library (520 bytes" in cuda_libraries.damage(library)


def test_a_library_without_a_table_of_sections_is_judged_by_its_segments(tmp_path):
    """As where a tool such as patchelf has put new segments behind the table."""
    library = build_library(tmp_path, "libbare.so")
    content = bytearray(library.read_bytes())
    content[40:48], content[60:62] = bytes(8), bytes(2)  # where the table is, and its length
    library.write_bytes(content)
    assert cuda_libraries.damage(library) == ""
    assert cuda_libraries.damage(cut(library, 5000)).startswith("cut off after 5000 of at least ")


@pytest.mark.parametrize("num_bytes", [0, 100, 5000])
def test_a_damaged_library_of_pypis_is_named_with_the_remedy(num_bytes, tmp_path, monkeypatch):
    monkeypatch.delenv("GLUONPAR_CUDA", raising=False)
    library = cut(wheel_library(tmp_path, cuda_libraries.LIBRARIES[0]), num_bytes)
    program = (
        "import pathlib, sys; from gluonpar.runtime import cuda_libraries as cuda\n"
        "try: cuda.load_libraries(pathlib.Path(sys.argv[1]))\n"
        "except cuda.CannotLoad as error: print(error, '|', error.remedy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, "the process ended in the loader"
    assert f"{library} is damaged: " in done.stdout
    remedy = "pip install --force-reinstall --no-deps --no-cache-dir nvidia-libcudart-cu11"
    assert remedy in done.stdout


def test_the_import_says_what_is_damaged_and_what_to_do(tmp_path, monkeypatch):
    def damaged():
        raise cuda_libraries.CannotLoad(
            "/a/libcufft.so.10 is damaged: cut off", "reinstall nvidia-cufft-cu11"
        )

    monkeypatch.setattr(cuda_libraries, "load_libraries", damaged)
    words = (
        "^mxnet-cu112 cannot be loaded: /a/libcufft.so.10 is damaged: cut off. Remedy: reinstall"
    )
    with pytest.raises(ImportError, match=words):
        startup._import_mxnet("mxnet-cu112")


@pytest.mark.parametrize("choice", ["", "pypi"])
def test_pypis_cuda_libraries_come_first_otherwise(choice, monkeypatch):
    monkeypatch.setenv("GLUONPAR_CUDA", choice)
    assert cuda_libraries.preferred() == "pypi"


def test_a_choice_of_cuda_that_there_is_not_is_an_error(monkeypatch):
    monkeypatch.setenv("GLUONPAR_CUDA", "sytem")
    with pytest.raises(ValueError, match="GLUONPAR_CUDA=sytem is none of pypi, system; set one"):
        cuda_libraries.load_libraries()


def test_without_pypis_cuda_libraries_nothing_is_loaded(tmp_path):
    assert cuda_libraries.load_libraries(tmp_path) == []


def test_importing_brings_neither_plots_nor_progress_bars_nor_the_book():
    program = (
        "import sys, gluonpar; print(*sorted(m for m in ('tqdm', 'matplotlib', 'd2l', 'mpi4py')"
        "if m in sys.modules))"
    )
    assert python(program).stdout == "\n"
