#!/bin/sh
# Create a virtual environment with an interpreter that gluonpar supports, Python 3.8 to 3.14.
#
#     tools/make_venv.sh VENV [PYTHON]
#
# Without PYTHON, the first of python3, python3.14 ... python3.8 that runs and has a supported
# version is used. VENV/.made marks a complete environment. It holds the PYTHON argument ("-" for
# none), or "adopted" for an environment that existed before: that is used as it is and never
# removed. After a failure nothing is left behind.
set -eu

venv=$1
wanted=${2:-}

fail() {
    echo "make_venv: $*" >&2
    exit 1
}

version_of() {
    # Run it: pyenv puts shims of inactive versions on PATH, which fail.
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

fits() {
    case $1 in 3.8 | 3.9 | 3.1[0-4]) return 0 ;; *) return 1 ;; esac
}

# Set python and version to the first candidate that is supported.
choose() {
    seen=
    for python in "$@"; do
        if ! command -v "$python" >/dev/null; then
            version="not found"
            [ -n "$wanted" ] || continue
        elif ! version=$(version_of "$python"); then
            version="does not run"
        elif fits "$version"; then
            return 0
        fi
        seen="$seen${seen:+, }$python ($version)"
    done
    fail "gluonpar needs Python 3.8 to 3.14; tried: ${seen:-no python3 on PATH}." \
        "Install one of these, or give its path: make ... PYTHON=/path/to/python3.13"
}

# Whether this is Debian's interpreter without ensurepip, which Debian ships in a separate package.
debian_lacks_ensurepip() {
    [ -e /etc/debian_version ] && "$python" -c 'import sys, importlib.util as util
sys.exit(sys.base_prefix != "/usr" or util.find_spec("ensurepip") is not None)'
}

build() {
    mkdir -p "$venv"
    : >"$venv/.making"
    "$python" -m venv "$venv" 2>&1
}

ours() {
    [ -e "$venv/.making" ] || { [ -e "$venv/.made" ] && [ "$(cat "$venv/.made")" != adopted ]; }
}

if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && ! ours; then
    version=$(version_of "$venv/bin/python") || version="no working Python"
    [ -z "$wanted" ] && fits "$version" && "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
        fail "$venv was not created by make and has $version; make can only use it if it is an" \
            "environment of Python 3.8 to 3.14 with pip, and without PYTHON=..." \
            "Remove it, or choose another folder: make ... VENV=.venv-gluonpar"
    echo adopted >"$venv/.made"
    echo "make_venv: using $venv as it is (Python $version)" >&2
    exit 0
fi

if [ -n "$wanted" ]; then
    choose "$wanted"
else
    choose python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python3.8
fi

rm -rf "$venv" # incomplete, or made with another interpreter
trap 'rm -rf "$venv"' EXIT
trap 'exit 1' HUP INT TERM
echo "make_venv: $venv with $python ($version)" >&2
if ! output=$(build); then
    debian_lacks_ensurepip || fail "$python -m venv $venv failed: $output"
    package=python$version-venv
    "$(dirname "$0")/apt_install.sh" "$python -m venv needs it" "$package"
    rm -rf "$venv"
    output=$(build) || fail "$python -m venv $venv failed: $output"
fi
echo "${wanted:--}" >"$venv/.made"
rm "$venv/.making"
trap - EXIT
