"""Run `make train`, `make test` and the set-up of `make notebook` in minimal Debian systems.

    make test-bare                        # Debian 12, 13 and sid
    make test-bare ARGS="--systems sid"   # or bookworm, trixie, separated by spaces

debootstrap makes each system (--variant=minbase and python3, make, git, ca-certificates) under
.matrix/bare/, from the mirror that apt uses here. The commit that is checked out is cloned into it.
The targets run there as root, with this machine's certificates and settings of pip, apt and the
name resolver, and with devices, processes and mounts of their own. Each system takes 0.5 GB of
downloads, 3 GB of disk and about 15 minutes. Logs and the table (Markdown) are written to
.matrix/bare/; the systems are removed unless --keep is given.

Exit status: 0, all targets passed; 1, one failed or a system could not be made; 2, wrong arguments,
or not root. The script needs x86-64 Linux, root, Python 3.8 and its standard library; it installs
debootstrap.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = {"bookworm": "Debian 12", "trixie": "Debian 13", "sid": "Debian sid"}
PACKAGES = "python3,make,git,ca-certificates"
TARGETS = {"train": "make train", "notebook": "make .venv/.notebook", "test": "make test"}
HEADINGS = ("system", "Python", "NumPy", *TARGETS, "seconds")
VERSIONS = "import sys, numpy; print('%d.%d.%d' % sys.version_info[:3], numpy.__version__)"

# What reaches the mirrors from this machine reaches them from the system, too.
COPIED = (
    *("/etc/hosts", "/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"),
    *("/etc/pip.conf", "/etc/xdg/pip", "~/.config/pip", "~/.pip"),
)
INHERITED = ("PIP_", "SSL_CERT_", "REQUESTS_CA_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
APT = ("Acquire::http", "Acquire::https", "Acquire::Check-Valid-Until", "Acquire::Check-Date")
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/srv", "LANG": "C.UTF-8"}

# The mounts are in a namespace of their own and end with it, as all processes of the system do.
# The device files are the system's own: debootstrap makes them by mknod.
MOUNT = """
mount -t proc proc "$0/proc"
mount -t sysfs -o ro sysfs "$0/sys"
mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$0/dev/pts"
exec chroot "$0" sh -c 'cd /srv/gluonpar && exec '"$1"
"""
ENTER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-ec", MOUNT]


class Row(NamedTuple):
    """One row of the table: a system's versions, and what became of each target."""

    name: str
    versions: tuple[str, str]
    results: dict[str, str]
    seconds: float

    @property
    def bad(self) -> bool:
        """Whether a target failed or did not run."""
        return not all(self.results.get(target, "").startswith("passed") for target in TARGETS)

    def cells(self) -> tuple[str, ...]:
        """Return the row's texts, in the order of HEADINGS."""
        results = [self.results.get(target, "") for target in TARGETS]
        return (self.name, *self.versions, *results, f"{self.seconds:.0f}")


def output_of(*command: str) -> str:
    """Return what a program prints, or '' if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def logged(command: list[str], log: Path) -> int:
    """Run a command in the repository, append its output to ``log``; return its exit status."""
    outer_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    env = {name: value for name, value in os.environ.items() if name not in outer_make}
    with log.open("ab") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        return subprocess.run(command, cwd=ROOT, env=env, **streams).returncode


def mirror() -> str:
    """Return the address of the Debian mirror that apt uses here."""
    wanted = ("Created-By: Packages", "Origin: Debian", "Label: Debian", "Component: main")
    mirrors = output_of("apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted).split()
    if not mirrors:
        raise SystemExit("bare_systems: apt-get names no Debian mirror; see `apt-get indextargets`")
    return mirrors[0]


def make_system(suite: str, system: Path, log: Path) -> bool:
    """Make a minimal system with a clone of this repository; return whether that succeeded."""
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    # It mounts /proc there. In a namespace of its own, the mount ends with it in any case.
    command = ["unshare", "--mount", "debootstrap", *options, suite, str(system), mirror()]
    if logged(command, log):
        return False
    for name in COPIED:
        source = Path(name).expanduser()
        target = system / str(source).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            shutil.copy(source, target)
    (system / "etc/apt/apt.conf.d/99host").write_text(output_of("apt-config", "dump", *APT) + "\n")
    return logged(["git", "clone", "--quiet", str(ROOT), str(system / "srv/gluonpar")], log) == 0


def enter(system: Path, command: str) -> list[str]:
    """Return the command that runs a command in the system's clone."""
    inherited = [f"{k}={v}" for k, v in os.environ.items() if k.upper().startswith(INHERITED)]
    environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return ["env", "-i", *environment, *inherited, *ENTER, str(system), command]


def last_summary(log: Path) -> str:
    """Return pytest's last line with numbers of tests, or ''."""
    lines = log.read_text("utf-8").splitlines()
    return next((line for line in reversed(lines) if re.search(r"\d+ passed", line)), "")


def run(suite: str, folder: Path, keep: bool) -> Row:
    """Make one system, run the targets in it, and return its row."""
    system, start = folder / suite, time.monotonic()
    shutil.rmtree(system, ignore_errors=True)
    results, versions = {}, ("", "")
    log = folder / f"{suite}.log"
    log.write_text("")
    if make_system(suite, system, log):
        for target, command in TARGETS.items():
            log = folder / f"{suite}-{target}.log"
            log.write_text("")
            began = time.monotonic()
            failed = logged(enter(system, command), log)
            numbers = re.findall(r"\d+ (?:passed|failed|error|skipped)", last_summary(log))
            words = ": ".join(filter(None, ["FAILED" if failed else "passed", ", ".join(numbers)]))
            results[target] = f"{words} ({time.monotonic() - began:.0f} s)"
            print(f"  {command}: {results[target]}; {log}", flush=True)
        printed = output_of(*enter(system, f'.venv/bin/python -c "{VERSIONS}"')).split()
        versions = (*printed, "", "")[:2]
    else:
        print(f"  the system could not be made; {log}", flush=True)
    if not keep:
        shutil.rmtree(system, ignore_errors=True)
    return Row(SYSTEMS[suite], versions, results, time.monotonic() - start)


def main() -> int:
    """Run the targets in all systems and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=" ".join(SYSTEMS), help="separated by spaces")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix" / "bare")
    parser.add_argument("--keep", action="store_true", help="keep the systems")
    options = parser.parse_args()
    unknown = sorted(set(options.systems.split()) - set(SYSTEMS))
    if unknown:
        parser.error(f"--systems must be of {', '.join(SYSTEMS)}, got {', '.join(unknown)}")
    if os.geteuid() != 0:
        parser.error("only root can make a system and enter it")
    if shutil.which("debootstrap") is None:
        install = [ROOT / "tools" / "apt_install.sh", "bare_systems makes systems with it"]
        if subprocess.run([*install, "debootstrap"]).returncode:
            return 1
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for suite in options.systems.split():
        print(f"{SYSTEMS[suite]} ({suite})", flush=True)
        rows.append(run(suite, folder, options.keep))
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in rows)]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    (folder / "table.md").write_text(text)
    print(f"\n{text}", end="")
    return int(any(row.bad for row in rows))


if __name__ == "__main__":
    sys.exit(main())
