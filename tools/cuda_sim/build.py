"""Build the simulated CUDA libraries with g++.

    python tools/cuda_sim/build.py [FOLDER] [--mxnet PACKAGE] [--kernels]

FOLDER (default .cuda-sim in the checkout) gets lib/, with libcudart.so.11.0 and all others that
libmxnet.so of mxnet-cu112 1.9.1 needs. What is up to date is not built again, and what was
downloaded is not downloaded again. --kernels also compiles the kernels that the project's tests
launch, a minute's work; without it, each is compiled when it is first launched.

PACKAGE is the installed package mxnet of mxnet-cu112; by default that of the Python that runs this,
and if it has none, the wheel is downloaded (499 MB). NVIDIA's headers come from two small wheels.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent import futures
from typing import Callable, Iterable, Iterator, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
DEFAULT_FOLDER = HERE.parents[1] / ".cuda-sim"
MXNET = "mxnet-cu112==1.9.1"
HEADERS = ("nvidia-cuda-runtime-cu11==11.8.89", "nvidia-cuda-nvcc-cu11==11.8.89")
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-pthread", "-Wall", "-Wno-unused-function")


class BuildError(RuntimeError):
    """A tool, a download or the right MXNet is missing, or g++ refuses a source."""


class Library(NamedTuple):
    """One library: its name, which is its soname, its sources, and how its functions begin."""

    soname: str
    sources: tuple[str, ...] = ()
    prefix: str = ""


CUDART = Library(
    "libcudart.so.11.0",
    (
        "cudart.cpp",
        "launch.cpp",
        "streams.cpp",
        "memory.cpp",
        "faults.cpp",
        "devices.cpp",
        "options.cpp",
        "counters.cpp",
        "errors.cpp",
    ),
    "(__)?cuda[A-Z]",
)
CUDNN = Library(
    "libcudnn.so.8",
    ("cudnn.cpp", "cudnn_convolution.cpp", "cudnn_pooling.cpp", "cudnn_batch_norm.cpp"),
    "cudnn[A-Z]",
)
KERNELS = "libcuda_sim_kernels.so"

# The sources that do not exist yet are left out, and their functions are stubs.
LIBRARIES = (
    CUDART,
    Library("libcuda.so.1", ("cuda.cpp",), "cu[A-Z]"),
    Library("libcublas.so.11", ("cublas.cpp",), "cublas[A-Z]"),
    CUDNN,
    Library("libcufft.so.10", ("cufft.cpp",), "cufft[A-Z]"),
    Library("libcurand.so.10", ("curand.cpp",), "curand[A-Z]"),
    Library("libcusolver.so.11", ("cusolver.cpp",), "cusolver[A-Z]"),
    Library("libnccl.so.2", ("nccl.cpp",), "nccl[A-Z]"),
    Library("libnvrtc.so.11.2", ("nvrtc.cpp",), "nvrtc[A-Z]"),
    Library("libnvToolsExt.so.1", ("nvtx.cpp",), "nvtx[A-Z]"),
    # These only have to be there: CUDA's libraries load each other, and gluonpar loads them all.
    Library("libcublasLt.so.11"),
    Library("libcusparse.so.11"),
    *(
        Library(f"libcudnn_{part}_{phase}.so.8")
        for part in ("ops", "cnn", "adv")
        for phase in ("infer", "train")
    ),
)

STUB_START = """\
#include "sim.h"
#define STUB(name) \\
  extern "C" void name() { cuda_sim::stop("%s is not simulated", #name); }
"""


def build(
    folder: pathlib.Path = DEFAULT_FOLDER, mxnet: pathlib.Path | None = None, kernels: bool = False
) -> pathlib.Path:
    """Build what is missing or out of date in ``folder``; return the folder of the libraries.

    ``mxnet`` and ``kernels`` are the options --mxnet and --kernels.

    Raises BuildError, with the remedy, if something needed is missing or does not compile.
    """
    for tool, package in (("g++", "g++"), ("nm", "binutils")):
        if shutil.which(tool) is None:
            raise BuildError(f"{tool} is missing: install it, on Debian the package {package}")
    folder = folder.resolve()
    (folder / "lib").mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    with _lock(folder):
        package = mxnet or installed_mxnet() or _downloaded_mxnet(folder)
        headers = cuda_headers(folder)
        imported = _imported(package / "libmxnet.so", folder)
        includes = (HERE, headers, package / "include")
        builder = _Builder(folder, includes)
        builder.build(CUDART, imported)  # which the others are linked to
        with futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            built = [pool.submit(builder.build, one, imported) for one in LIBRARIES[1:]]
            built.append(pool.submit(builder.build_kernels))
        for one in built:
            one.result()
        if kernels:
            _precompile(folder / "kernels", package / "include")
    return folder / "lib"


def installed_mxnet() -> pathlib.Path | None:
    """Return this Python's package mxnet if its libmxnet.so needs CUDA, else None."""
    spec = importlib.util.find_spec("mxnet")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = pathlib.Path(next(iter(spec.submodule_search_locations)))
    library = package / "libmxnet.so"
    # The wheel of CUDA 11.2 has 1.9 GB unpacked, and that for CPUs less than 0.2 GB.
    return package if library.exists() and library.stat().st_size > 5e8 else None


class _Builder:
    """Compiles sources to objects/, and links them in lib/, where a command or its input changed.

    A file's stamp, beside it, is a digest of the command and of all that it reads.
    """

    def __init__(self, folder: pathlib.Path, includes: tuple[pathlib.Path, ...]):
        self.folder = folder
        self.flags = [*FLAGS, *(f"-I{include}" for include in includes)]

    def build(self, library: Library, imported: list[str]) -> None:
        """Build one of LIBRARIES, with a stub for each function that its sources lack."""
        sources = [HERE / name for name in library.sources if (HERE / name).exists()]
        objects = [self._compile(source) for source in sources]
        written = set(_defined(objects))
        ours = [name for name in imported if _owner(name) is library]
        missing = [name for name in ours if name not in written]
        stubs = self.folder / "objects" / f"stubs_{library.soname}.cpp"
        text = STUB_START + "".join(f"STUB({name})\n" for name in missing)
        _write_if_changed(stubs, text)
        self._link(library.soname, [self._compile(stubs), *objects])

    def build_kernels(self) -> None:
        """Build the library of the simulated kernels, if there are sources in kernels/."""
        objects = [self._compile(source) for source in sorted(HERE.glob("kernels/*.cpp"))]
        if objects:
            self._link(KERNELS, objects)

    def _compile(self, source: pathlib.Path) -> pathlib.Path:
        target = self.folder / "objects" / f"{source.name}.o"
        # g++ lists what it read, which decides whether the next build may skip this.
        listed = target.with_suffix(".d")
        command = ["g++", *self.flags, "-MMD", "-MF", str(listed), "-c", str(source)]
        self._run([*command, "-o", str(target)], target, lambda: _listed_files(listed))
        return target

    def _link(self, soname: str, objects: list[pathlib.Path]) -> None:
        target = self.folder / "lib" / soname
        script = self.folder / "objects" / f"{soname}.map"
        # The symbols' version in NVIDIA's libraries, which libmxnet.so looks for, is the soname.
        _write_if_changed(script, f"{soname} {{ global: *; }};\n")
        command = ["g++", "-shared", "-pthread", *map(str, objects), "-o", str(target)]
        command += [f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}"]
        if soname != CUDART.soname:
            command += [f"-L{target.parent}", f"-l:{CUDART.soname}", "-Wl,-rpath,$ORIGIN"]
        command.append("-ldl")
        self._run(command, target, lambda: objects)

    def _run(
        self,
        command: list[str],
        target: pathlib.Path,
        inputs: Callable[[], Iterable[pathlib.Path]],
    ) -> None:
        """Run the command if it or one of its inputs, known once it has run, has changed."""
        stamp = self.folder / "objects" / f"{target.name}.stamp"
        if target.exists() and stamp.exists() and stamp.read_text() == _digest(command, inputs()):
            return
        print("building", target.name, flush=True)
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BuildError(f"{target.name} does not build:\n{done.stderr}")
        sys.stderr.write(done.stderr)
        stamp.write_text(_digest(command, inputs()))


def _precompile(cache: pathlib.Path, include: pathlib.Path) -> None:
    jobs = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, str(HERE / "kernels" / "precompile.py"), "--cache", str(cache)]
    command += ["--include", str(include), "--jobs", jobs]
    if subprocess.run(command).returncode != 0:
        raise BuildError("the kernels do not compile: see the messages above")


def _digest(command: list[str], inputs: Iterable[pathlib.Path]) -> str:
    digest = hashlib.sha256(repr(command).encode())
    for path in inputs:
        digest.update(path.read_bytes() if path.exists() else b"missing")
    return digest.hexdigest()


def _listed_files(listed: pathlib.Path) -> list[pathlib.Path]:
    """Return the files that a list of g++, in make's syntax, says the target depends on."""
    text = listed.read_text() if listed.exists() else ""
    _, _, names = text.replace("\\\n", " ").partition(": ")
    return [pathlib.Path(name) for name in names.split()]


def _owner(function: str) -> Library | None:
    """Return the library that a function belongs to, None for one that is not CUDA's."""
    return next((one for one in LIBRARIES if one.prefix and re.match(one.prefix, function)), None)


def _imported(libmxnet: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Return the functions of CUDA's libraries that libmxnet.so imports; kept in a file."""
    if not libmxnet.exists():
        raise BuildError(f"{libmxnet} does not exist: --mxnet must be a package mxnet of {MXNET}")
    kept = folder / "objects" / "imported.txt"
    if not kept.exists() or kept.stat().st_mtime < libmxnet.stat().st_mtime:
        names = [name for name in _symbols("--undefined-only", libmxnet) if _owner(name)]
        if "cudaMalloc" not in names:
            raise BuildError(f"{libmxnet} does not use CUDA; install or download {MXNET}")
        _write_if_changed(kept, "\n".join(names))
    return kept.read_text().split()


def _defined(objects: list[pathlib.Path]) -> list[str]:
    return [name for path in objects for name in _symbols("--defined-only", path, dynamic=False)]


def _symbols(kind: str, path: pathlib.Path, dynamic: bool = True) -> list[str]:
    """Return the names of a library's or an object's symbols, without their versions."""
    command = ["nm", "-P", kind, *(["-D"] if dynamic else ["-g"]), str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({line.split()[0].split("@")[0] for line in listing.splitlines() if line})


def cuda_headers(folder: pathlib.Path) -> pathlib.Path:
    """Return the folder with CUDA's headers; cuda_runtime_api.h includes crt/ of nvcc's wheel."""
    include = folder / "include"
    if not (include / ".complete").exists():
        for requirement in HEADERS:
            with zipfile.ZipFile(_download(requirement, folder)) as wheel:
                for name in wheel.namelist():
                    inside = re.fullmatch(r"nvidia/cuda_\w+/include/((?:crt/)?[^/]+)", name)
                    if inside:
                        _write(include / inside[1], wheel.read(name))
        (include / ".complete").touch()
    return include


def _downloaded_mxnet(folder: pathlib.Path) -> pathlib.Path:
    if not (folder / "wheel" / ".complete").exists():
        with zipfile.ZipFile(_download(MXNET, folder)) as wheel:
            wheel.extractall(folder / "wheel")
        (folder / "wheel" / ".complete").touch()
    return folder / "wheel" / "mxnet"


def _download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the wheel of a requirement, downloaded by pip if it is not in the folder."""
    downloads = folder / "downloads"
    name, version = requirement.replace("-", "_").split("==")
    pattern = f"{name}-{version}-*.whl"
    if not list(downloads.glob(pattern)):
        print("downloading", requirement, flush=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--quiet", "--dest", str(downloads), requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            failure = f"pip cannot download {requirement}:\n{done.stderr.strip()}"
            remedy = f"connect to a package index, or put the wheel into {downloads}"
            raise BuildError(f"{failure}\n{remedy}")
    return next(downloads.glob(pattern))


def _write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _write_if_changed(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        _write(path, text.encode())


@contextlib.contextmanager
def _lock(folder: pathlib.Path) -> Iterator[None]:
    """Hold the folder for this process: tests in parallel may all want the libraries."""
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build, and print the folder of the libraries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=DEFAULT_FOLDER)
    parser.add_argument("--mxnet", type=pathlib.Path, help="the installed package of " + MXNET)
    parser.add_argument("--kernels", action="store_true", help="compile the tests' kernels, too")
    arguments = parser.parse_args()
    try:
        print(build(arguments.folder, arguments.mxnet, arguments.kernels))
    except BuildError as error:
        print(f"build.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
