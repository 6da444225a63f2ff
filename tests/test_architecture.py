"""The one-way flow: which module may import which, read from the source."""

import ast
import pathlib
import re

import pytest

import gluonpar

PACKAGE = pathlib.Path(gluonpar.__file__).parent  # of the checkout, or where it is installed

# From the hill's foot to its top: a module imports only from the lines below its own.
FLOW = """
__main__
proof
verify
bench_training.tables bench_training.chart bench_training.soak bench_training.panels
bench_cluster.chart
bench_cluster.tables
bench_cluster.contest
bench_cluster.ranks_of_ours bench_cluster.ranks_of_others
bench_training.contest bench_training.steady
bench_cli bench_allreduce.contest bench_training.candidates bench_training.ours bench_training.gluon
bench_allreduce.payload bench_training.held cli
bench_allreduce.candidates
measure
train towers
resume
rank_run
learners tasks
training_state
trainer
metrics report checkpoint optimizer_states onnx_export
profile
step parallel average tower_variables pictures.step pictures.timeline pictures.scaling
losses models
graph
update owned_updates
optim
gluon_replicas
sync_batch_norm
ragged batch_norm
replicas sharding data kvstore
between_processes
collectives
collectives.compression
collectives.bucket
collectives.reduction
collectives.bidirectional_ring
collectives.star collectives.balanced collectives.ring collectives.tree collectives.halving_doubling
collectives.fused
collectives.host collectives.kvstore collectives.tracing
collectives.blocks
collectives.registry collectives.execute collectives.choice collectives.drawing
collectives.checks
collectives.plan
cluster
cluster.agreement
cluster.exchange
cluster.sums
cluster.world
cluster.watch
cluster.judge cluster.wire cluster.launcher cluster.ending
threads
engine
memory
asked
doctor
symptoms gpu_symptoms
probes
devices places
download fashion_mnist
idx
timeline
operators
partition runtime files meeting archive pictures.paper
cuda driver wheels findings version room networks
bench_cluster.model bench_cluster bench_cluster.rank
bench_cluster.jobs
bench_cluster.gate bench_cluster.joined
bench_allreduce bench_training pictures
bench_training.book bench_training.torch_ddp bench_training.horovod_gluon bench_training.worker
bench_training.resnet bench_training.ranks bench_training.alone
bench_training.process bench_training.training bench_training.workloads
bench_training.alike bench_training.vitals
""".split("\n")
HEIGHT = {name: i for i, line in enumerate(FLOW) for name in line.split()}
# Rooms that must not know of those above them, whatever the heights say.
NO_MODELS = {"replicas", "models", "optim", "step", "sharding", "train", "losses", "data"}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name[: -len(".__init__")] if name.endswith(".__init__") else name, path


def imports(path):
    """gluonpar's modules that the file imports, at the top or inside a function."""
    names = {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gluonpar":
            base = node.module[len("gluonpar") :].lstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield full if full in names else base
        elif isinstance(node, ast.Import):
            yield from (a.name[9:] for a in node.names if a.name.startswith("gluonpar."))


FILES = {name: path for name, path in modules() if name != "__init__"}


def test_every_module_has_its_place_in_the_flow():
    assert set(FILES) == set(HEIGHT)


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_go_downhill(name):
    uphill = [other for other in imports(FILES[name]) if HEIGHT[other] <= HEIGHT[name]]
    assert not uphill, f"gluonpar.{name} imports {uphill}"


@pytest.mark.parametrize("name", sorted(n for n in FILES if n.startswith("collectives")))
def test_collectives_know_nothing_of_models(name):
    assert not NO_MODELS & set(imports(FILES[name]))


PLANS = ("star", "balanced", "ring", "bidirectional_ring", "tree", "halving_doubling")
PURE = (
    "partition",
    "operators",
    "timeline",
    "driver",
    "cuda",
    "findings",
    "idx",
    "meeting",
    "collectives.plan",
    "collectives.registry",
) + tuple(f"collectives.{name}" for name in PLANS)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_do_not_import_mxnet(name):
    assert "mxnet" not in FILES[name].read_text().split("import", 1)[-1].replace("mxnet-cu112", "")


def test_private_mxnet_interfaces_stay_in_their_rooms():
    allowed = {"runtime", "engine", "memory", "threads", "replicas"}
    users = {name for name, path in FILES.items() if re.search(r"\b_LIB\b", path.read_text())}
    assert users <= allowed
