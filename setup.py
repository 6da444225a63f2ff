"""The license, in a form that all setuptools from 64 on take; pyproject.toml has the rest."""

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 64:  # it would install nothing, and not say so
    raise SystemExit(
        f"gluonpar needs setuptools 64 or newer, and is built with {setuptools.__version__}: "
        "pip install --upgrade pip setuptools"
    )

setuptools.setup(license="Apache-2.0", license_files=["LICENSE"])
