"""Compile emulated kernels into libraries that the simulator loads.

The demangled name of a kernel is a C++ expression, which instantiates a template of the headers
beside this file: one line of C++ is all that there is to compile.

    python precompile.py --cache FOLDER              # the kernels of kernels.txt, in large pieces
    python precompile.py --cache FOLDER NAME ...     # each into a library of its own

A library with one kernel is named after its mangled name, so that libcuda_sim_kernels.so finds it.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = pathlib.Path(__file__).resolve().parent
KERNELS_PER_LIBRARY = 60
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-w", "-mf16c", "-fno-gnu-unique"]


def fnv1a(data):
    """Return the 64-bit FNV-1a hash of bytes in hexadecimal, as make_kernel.cpp computes it."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def headers_hash():
    """Return a hash of what the libraries are compiled from, other than MXNet's headers."""
    sources = [HERE.parent / "sim.h", *sorted(HERE.glob("*.h"))]
    return fnv1a(b"".join(source.read_bytes() for source in sources))


def demangle(names):
    """Return the demangled names."""
    text = "\n".join(names)
    done = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def split_signature(demangled):
    """Split "void kernel<arguments>(parameters)" into the kernel and its parameters.

    >>> split_signature("void a::kernel<a::op<(a::kind)1>, int>(int, float*)")
    ('a::kernel<a::op<(a::kind)1>, int>', 'int, float*')
    """
    text = demangled.replace("(anonymous namespace)::", "")
    text = re.sub(r"^(static )?void ", "", text)
    depth = 0
    for position, character in enumerate(text):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return text[:position], text[position + 1 : text.rindex(")")]
    raise ValueError(f"{demangled} is not the name of a function with parameters")


def source_of(names):
    """Return the lines of C++ that instantiate and register the kernels, one line a kernel."""
    lines = ['#include "all.h"']
    for number, (name, demangled) in enumerate(zip(names, demangle(names))):
        kernel, parameters = split_signature(demangled)
        checked = f"cuda_sim::checked(cuda_sim::Parameters<{parameters}>(), &{kernel})"
        lines.append(f'static cuda_sim::Registration<{checked}> kernel_{number}("{name}");')
    listed = "".join(f'"{name}", ' for name in names)
    lines.append(f'extern "C" const char* const cuda_sim_kernel_names[] = {{{listed}nullptr}};')
    return lines


class Compiler:
    """Compiles libraries of kernels into the folder of the cache for these headers."""

    def __init__(self, cache, include=None):
        self.include = pathlib.Path(include or mxnet_include())
        self.folder = pathlib.Path(cache) / headers_hash()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.ensure("all.h", self.write_header)
        self.ensure("libstub.so", self.make_stub)
        self.ensure("all.h.gch", self.precompile_header)

    def ensure(self, name, make):
        """Have `make` write a file unless it exists; other processes never see a part of it."""
        target = self.folder / name
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                temporary = pathlib.Path(folder) / name
                make(temporary)
                os.replace(temporary, target)

    def run(self, *arguments):
        """Run g++ with these arguments; return the ended process."""
        command = ["g++", *FLAGS, f"-I{self.folder}", f"-I{self.include}", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True)

    def write_header(self, target):
        """Write the header that includes all headers of kernels."""
        target.write_text(f'#include "{HERE / "all.h"}"\n')

    def precompile_header(self, target):
        """Compile that header, so that a kernel takes less than a second."""
        done = self.run("-x", "c++-header", HERE / "all.h", "-o", target)
        if done.returncode:
            raise RuntimeError(f"the headers of the kernels do not compile:\n{done.stderr}")

    def make_stub(self, target):
        """Make an empty library of libcudart's name.

        The kernels' libraries are linked to it instead of libcudart: that libcudart is loaded by
        then is all they need.
        """
        soname = "-Wl,-soname,libcudart.so.11.0"
        self.run("-shared", soname, "-x", "c++", "/dev/null", "-o", target).check_returncode()

    def compile(self, names, library):
        """Compile one library; return g++'s messages, and the names that they are about."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            source = pathlib.Path(folder) / "kernels.cpp"
            source.write_text("\n".join(source_of(names)) + "\n")
            built = pathlib.Path(folder) / "kernels.so"
            stub = self.folder / "libstub.so"
            unresolved = "-Wl,--unresolved-symbols=ignore-all,--no-as-needed"
            done = self.run("-shared", source, "-o", built, unresolved, stub)
            if done.returncode == 0:
                os.replace(built, self.folder / library)
                return "", []
            lines = {int(line) for line in re.findall(r"kernels\.cpp:(\d+):", done.stderr)}
            return done.stderr, [names[line - 2] for line in sorted(lines)]

    def compile_all(self, names, library):
        """Compile a library without the kernels that do not compile; return these."""
        dropped = []
        while names:
            messages, failed = self.compile(names, library)
            if not messages:
                break
            if not failed:
                raise RuntimeError(messages)
            dropped += failed
            names = [name for name in names if name not in failed]
        return dropped


def mxnet_include():
    """Return the folder of headers of the installed mxnet, without importing it."""
    spec = importlib.util.find_spec("mxnet")
    if spec is None:
        raise ModuleNotFoundError("mxnet is not installed; give its headers by --include")
    return pathlib.Path(spec.origin).parent / "include"


def build(names, cache, include=None, jobs=1):
    """Compile `names` in large libraries; return the names of those that do not compile.

    What is in the cache already is not compiled again.
    """
    compiler = Compiler(cache, include)
    done = {
        name for listed in compiler.folder.glob("many-*.txt") for name in listed.read_text().split()
    }
    names = sorted(set(names) - done)
    pieces = [
        names[start : start + KERNELS_PER_LIBRARY]
        for start in range(0, len(names), KERNELS_PER_LIBRARY)
    ]

    def compile_piece(piece):
        stem = f"many-{fnv1a(' '.join(piece).encode())}"
        dropped = compiler.compile_all(piece, f"{stem}.so")
        compiled = [name for name in piece if name not in dropped]
        (compiler.folder / f"{stem}.txt").write_text("\n".join(compiled))
        return dropped

    with ThreadPoolExecutor(jobs) as pool:
        return [name for dropped in pool.map(compile_piece, pieces) for name in dropped]


def add_to_list(requested):
    """Add the mangled names in a file to kernels.txt."""
    listed = HERE / "kernels.txt"
    names = {*listed.read_text().split(), *requested.read_text().split()}
    listed.write_text("".join(f"{name}\n" for name in sorted(names)))


def main():
    """Compile the kernels that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", required=True, help="folder of the compiled kernels")
    parser.add_argument("--include", help="MXNet's folder of headers (default: the installed)")
    parser.add_argument(
        "--add-requested",
        action="store_true",
        help="first add to kernels.txt what was compiled on demand with this cache",
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilers that run at once")
    parser.add_argument("names", nargs="*", help="mangled names (default: those of kernels.txt)")
    arguments = parser.parse_args()
    if arguments.names:
        compiler = Compiler(arguments.cache, arguments.include)
        for name in arguments.names:
            messages, _ = compiler.compile([name], f"{fnv1a(name.encode())}.so")
            if messages:
                error = re.search(r"^.*error: .*", messages, re.MULTILINE)
                sys.exit(f"{demangle([name])[0]}\n{error.group(0) if error else messages}")
        return
    if arguments.add_requested:
        add_to_list(pathlib.Path(arguments.cache) / "requested.txt")
    names = (HERE / "kernels.txt").read_text().split()
    dropped = build(names, arguments.cache, arguments.include, arguments.jobs)
    for demangled in demangle(dropped) if dropped else []:
        print("does not compile:", demangled)
    print(len(set(names)) - len(dropped), "kernels")


if __name__ == "__main__":
    main()
