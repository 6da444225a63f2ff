#!/bin/sh
# Install packages of Debian's as root; for other users, print the command and fail.
#
#     tools/apt_install.sh REASON PACKAGE...
set -eu

reason=$1
shift
command="apt-get install $*"
fail() {
    echo "apt_install: $reason: $*" >&2
    exit 1
}

command -v apt-get >/dev/null || fail "install what Debian and Ubuntu install with: $command"
[ "$(id -u)" = 0 ] || fail "sudo $command"
echo "apt_install: $reason: $command" >&2
export DEBIAN_FRONTEND=noninteractive
apt() { apt-get install -y -qq --no-install-recommends "$@" 2>&1; }
output=$(apt "$@" || { apt-get update -qq 2>&1 && apt "$@"; }) || fail "$command failed: $output"
