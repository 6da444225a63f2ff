"""Which CUDA libraries are loaded, in which order, and how damaged ones are found."""

import shutil
from pathlib import Path

import pytest
from libcuda_stub import build_library, cut

from gluonpar.install import cuda_libraries
from gluonpar.install.cuda_libraries import LIBRARIES, LibraryError, damage, load_libraries


@pytest.fixture
def wheel_library(tmp_path, monkeypatch):
    """Put an empty library with this name where PyPI's wheels install it; return its path."""
    empty = build_library(tmp_path, "libempty.so")
    monkeypatch.setattr(cuda_libraries.sysconfig, "get_path", lambda name: str(tmp_path))

    def install(name):
        folder = tmp_path / "nvidia" / name.split(".")[0] / "lib"
        folder.mkdir(parents=True)
        return Path(shutil.copy(empty, folder / name))

    return install


@pytest.fixture
def dlopen(monkeypatch):
    """A list of what is loaded, in order; ``.system`` holds what the system's loader finds."""

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


ENDS = [LIBRARIES[0], LIBRARIES[-1]]


@pytest.mark.parametrize(
    ("source", "of_system", "of_wheels", "taken_from_system"),
    [
        *((source, LIBRARIES, LIBRARIES, []) for source in (None, "", "pypi")),
        ("system", ENDS, LIBRARIES[:2], ENDS),
    ],
)
def test_libraries_are_loaded_in_order_from_pypis_wheels_unless_the_environment_says_system(
    source, of_system, of_wheels, taken_from_system, wheel_library, dlopen, monkeypatch
):
    dlopen.system = set(of_system)
    if source is not None:
        monkeypatch.setenv("GLUONPAR_CUDA", source)
    paths = {name: wheel_library(name) for name in reversed(of_wheels)}
    paths.update((name, Path(name)) for name in taken_from_system)
    load_libraries()
    assert dlopen == [str(paths[name]) for name in LIBRARIES if name in paths]


def test_a_system_without_cuda_11_is_an_error_if_the_environment_asks_for_it(
    wheel_library, dlopen, monkeypatch
):
    wheel_library(LIBRARIES[0])
    dlopen.system = set(LIBRARIES[1:])
    monkeypatch.setenv("GLUONPAR_CUDA", "system")
    with pytest.raises(LibraryError, match="libcudart.so.11.0") as caught:
        load_libraries()
    assert "LD_LIBRARY_PATH" in caught.value.remedy and "unset GLUONPAR_CUDA" in caught.value.remedy
    assert dlopen == []


def test_a_library_is_whole_unless_its_last_byte_is_missing(tmp_path):
    library = build_library(tmp_path, "libwhole.so")
    assert damage(library) == ""
    num_bytes = library.stat().st_size
    cut(library, num_bytes - 1)
    assert damage(library) == f"cut off after {num_bytes - 1} of at least {num_bytes} bytes"
    for short in (200, 64, 63, 4, 0):
        assert damage(cut(library, short))
    library.write_bytes(b"<html>404 Not Found</html>" * 20)
    assert "520 bytes" in damage(library)


def test_a_library_without_a_section_table_is_checked_by_its_segments(tmp_path):
    """As where a tool such as patchelf has added segments behind the table."""
    library = build_library(tmp_path, "libbare.so")
    content = bytearray(library.read_bytes())
    content[40:48], content[60:62] = bytes(8), bytes(2)  # the table's offset, and its length
    library.write_bytes(content)
    assert damage(library) == ""
    assert damage(cut(library, 5000)).startswith("cut off after 5000 of at least ")
