"""The training benchmark's soak: growth, a slow-down and other changes are found, not noise."""

import dataclasses
import json
import math
import pathlib
import types

import bench_tools
import mxnet as mx
import numpy as np
import pytest
from bench_tools import actor, plant_statistics, program

from benchmarks import worker
from benchmarks.training import __main__ as script
from benchmarks.training import gluon, soak, soak_chart, train_batch, workloads
from benchmarks.training.candidates import CANDIDATES, OURS, Setting
from benchmarks.training.soak import Soak, SoakSample
from benchmarks.training.training import Training, compare_replicas

TINY = ("--device", "cpu", "--workload", "mlp", "--batch-size", "8", "--warmup", "1")
CPUS = [("cpu", 0), ("cpu", 1)]
TWO = [mx.cpu(0), mx.cpu(1)]
SETTING = Setting("lenet", TWO, batch_size=4)
SOUND = {"devices": 2, "parameters": 8, "differing": 0, "not_finite": 0}
PLANTED = pathlib.Path(__file__).parents[1] / "support" / "planted_worker.py"


@pytest.fixture
def command(capsys):
    return bench_tools.runner(script, capsys)


@pytest.fixture
def play(monkeypatch):
    """Return play(source, **statistics): a process that runs the source, as psutil describes it."""

    def played_by(source, name=OURS, **statistics):
        monkeypatch.setitem(CANDIDATES, name, program(source))
        plant_statistics(monkeypatch, **statistics)

    return played_by


def record(number=100, replicas=SOUND, losses=(2.0, 1.0), **changed):
    """Return a soak of samples of 10 steps, without fault but for what a function of i changes."""
    usual = {"seconds": 0.1, "cpu_seconds": 0.2, "resident_bytes": 10**8}
    usual.update(threads=3, descriptors=7)

    def sample(i):
        values = {k: changed.get(k, lambda i, v=v: v)(i) for k, v in usual.items()}
        return SoakSample(10 * i, **values)

    warm, *samples = map(sample, range(number + 1))
    return Soak("gluonpar", SETTING, warm, samples, replicas, losses)


def only(soak_):
    """Return the one complaint."""
    [(key, words)] = soak_.complaints.items()
    return key, words


class TestLaws:
    def test_a_sound_soak_has_no_complaint(self):
        assert record().complaints == {}

    @pytest.mark.parametrize("each", [0, 20_000, -500])
    def test_growth_is_that_of_the_line_through_the_last_nine_tenths(self, each):
        grows = record(resident_bytes=lambda i: 10**8 + each * i + (300 if i % 2 else 0))
        assert grows.line == pytest.approx((each / 10, 10**8 + 150), rel=1e-6, abs=2)
        assert grows.growth == pytest.approx(89 * each, abs=100)  # from sample 11 to sample 100

    def test_what_the_first_tenth_takes_does_not_count(self):
        early = record(resident_bytes=lambda i: 10**9 if i > 10 else 10**6 * i)
        late = record(resident_bytes=lambda i: 10**9 if i > 11 else 10**6 * i)
        assert (early.growth, late.growth > 10**7) == (0, True)

    def test_more_growth_than_is_allowed_is_wrong(self):
        just = 8_000_000 / 89
        assert record(resident_bytes=lambda i: int(0.999 * just * i)).complaints == {}
        key, words = only(record(resident_bytes=lambda i: int(1.5 * just * i)))
        assert key == "memory" and "12.0 MB" in words

    @pytest.mark.parametrize("what", ["threads", "descriptors"])
    @pytest.mark.parametrize("end", [2, 4])
    def test_the_end_must_have_as_many_as_the_warm_up(self, what, end):
        found = record(**{what: lambda i: end if i == 100 else 3})
        assert only(found) == (what, f"{end} {what} at the end, but 3 after the warm-up")
        assert record(**{what: lambda i: end if 1 < i < 100 else 3}).complaints == {}
        assert set(record(**{what: lambda i: end if i else 3}).complaints) == {what}

    def test_the_replicas_must_be_identical_and_finite(self):
        differ, infinite, one = (
            record(replicas={**SOUND, **changed})
            for changed in ({"differing": 3}, {"not_finite": 2}, {"devices": 1})
        )
        assert only(differ) == ("replicas", "3 of 8 parameters differ between devices")
        assert only(infinite) == ("finite", "2 of 8 parameters are not finite")
        assert only(one) == ("replicas", "replicas of 1 devices were compared, not of 2")

    @pytest.mark.parametrize("last", [2.0, 3.0, math.nan])
    def test_the_loss_must_fall(self, last):
        assert only(record(losses=(2.0, last)))[0] == "loss"

    def test_throughput_is_the_median_of_each_tenth(self):
        times = {3: 9.0, 100: 9.0, 50: 9.0}  # s: outliers in either tenth, and between
        found = record(seconds=lambda i: times.get(i, 0.1 if i <= 90 else 0.1025))
        first, last = found.throughput
        assert (first.median, *first.quartiles) == pytest.approx((400,) * 3)  # 40 images in 0.1 s
        assert (last.median, *last.quartiles) == pytest.approx((40 / 0.1025,) * 3)
        assert found.ratio == pytest.approx(0.1 / 0.1025)
        assert found.complaints == {}

    def test_a_slow_down_is_wrong_and_shown_with_its_figures(self):
        assert record(seconds=lambda i: 0.1 if i < 91 else 0.1 / 0.9701).complaints == {}
        slow = record(
            seconds=lambda i: 0.1 if i < 91 else 0.2,
            cpu_seconds=lambda i: 0.2 if i < 91 else 0.21,
        )
        key, words = only(slow)
        assert key == "throughput"
        for figure in ("0.500", "0.97", "400", "200", "20.00 ms", "21.00"):
            assert figure in words
        assert record(seconds=lambda i: 0.1 if i > 10 else 0.2).complaints == {}

    def test_a_sample_s_time_is_divided_by_its_own_steps(self):
        even = record()
        ends = [round(10.4 * i) for i in range(1, 101)]
        samples = [
            dataclasses.replace(s, steps=end, seconds=0.01 * (end - start))
            for s, end, start in zip(even.samples, ends, [0, *ends])
        ]
        uneven = dataclasses.replace(even, samples=samples)
        assert uneven.images_per_second == pytest.approx([400] * 100)


class TestReplicas:
    def test_they_are_compared_by_their_bits(self):
        a, b = np.float32([1, 2]), np.float32([[3]])
        ulp = np.nextafter(a, np.float32(9))
        assert compare_replicas([[a, b], [a.copy(), b.copy()]]) == {**SOUND, "parameters": 2}
        for other in (ulp, a.astype("float64"), a[:1], a.reshape(1, 2)):
            for devices in ([a, other, a], [a, a, other], [other, a, a]):
                found = compare_replicas([[value, b] for value in devices])
                assert (found["devices"], found["differing"]) == (3, 1)

    def test_a_value_that_is_not_finite_is_found_on_any_device(self):
        a = np.float32([1, 2])
        for value in (np.nan, np.inf, -np.inf):
            bad = np.float32([1, value])
            assert compare_replicas([[a, bad], [a, bad]]) == {**SOUND, "parameters": 2,
                                                           "not_finite": 1}  # fmt: skip
            found = compare_replicas([[a, a], [a, bad]])
            assert (found["differing"], found["not_finite"]) == (1, 1)

    @pytest.mark.parametrize("made", [train_batch, gluon])
    def test_a_training_returns_its_own(self, made, monkeypatch):
        monkeypatch.setitem(workloads.WORKLOADS, "resnet18", workloads.resnet18(8))
        task = workloads.task("resnet18", 4, CPUS)
        training = made.make(task)
        training.run(1)
        replicas = training.values()
        sizes = [[value.size for value in of] for of in replicas]
        assert sizes == [[value.size for value in task.params]] * 2
        # Moving statistics differ, as each device's shard does, and are not among them.
        assert compare_replicas(replicas) == {**SOUND, "parameters": len(task.params)}
        if made is train_batch:
            param = training.device_params[1][3]
        else:
            param = training.trained[3].data(mx.cpu(1))
        param[:1] += 1
        assert compare_replicas(training.values())["differing"] == 1


def test_the_seconds_of_steps_include_the_wait_for_their_end(monkeypatch):
    clock = types.SimpleNamespace(seconds=0.0)

    class Sleeps(Training):
        def step(self):
            clock.seconds += 1

        def wait(self):
            clock.seconds += 100

        def barrier(self):
            clock.seconds += 10_000

    now = types.SimpleNamespace(
        perf_counter=lambda: clock.seconds, process_time=lambda: 2 * clock.seconds
    )
    monkeypatch.setattr(worker, "time", now)
    assert worker.train(Sleeps(), 7) == {"seconds": 107, "cpu_seconds": 214}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acted", "statistics", "complaint"),
    [
        ({}, {}, ""),
        ({}, {"resident_bytes": lambda i: 10**8 - 25_000 * i}, ""),
        ({}, {"resident_bytes": lambda i: 10**8 + 100_000 * i}, "memory grew by 17.9 MB"),
        ({}, {"threads": lambda i: 3 + (i > 100)}, "4 threads at the end, but 3 after"),
        ({}, {"descriptors": lambda i: 7 - (i > 100)}, "6 descriptors at the end, but 7 after"),
        ({"replicas": {**SOUND, "differing": 1}}, {}, "1 of 8 parameters differ between devices"),
        ({"replicas": {**SOUND, "not_finite": 8}}, {}, "8 of 8 parameters are not finite"),
        ({"loss": 2.0}, {}, "the loss did not fall: 2.0000 at first, 2.0000 at the end"),
        (
            {"seconds": "steps * (0.02 if total > 401 else 0.01)"},
            {},
            "images/s of the last tenth are 0.500 of the first's",
        ),
    ],
)
def test_exit_code_and_line_of_each_fault(command, play, tmp_path, acted, statistics, complaint):
    play(actor(**acted), **statistics)
    path = tmp_path / "soak.json"
    code, out, err = command(*TINY, "--soak", 1000, "--json", path)
    title = "gluonpar, mlp, batch 8 on [cpu(0), cpu(1)]: "
    assert out[3].startswith(f"{title}1000 steps in 1") and out[3].endswith(" s, 200 samples")
    [row] = json.loads(path.read_text())["rows"]
    assert (code, len(err), row["wrong"]) == ((1, 1, True) if complaint else (0, 0, False))
    for line in (*err, *row["complaints"].values()):
        assert complaint in line
    assert all(title in line for line in err)


def test_json_has_every_sample(command, play, tmp_path):
    play(actor(loss=0.5), resident_bytes=lambda i: 100_000 + 375 * i, threads=lambda i: i)
    path = tmp_path / "soak.json"
    command(*TINY, "--soak", 250, "--warmup", 10, "--json", path)
    [row] = json.loads(path.read_text())["rows"]
    ends = [250 * i // 200 for i in range(1, 201)]
    assert row["steps"] == ends
    assert row["threads"] == list(range(1, 201))
    assert row["resident_bytes"] == [100_000 + 375 * i for i in range(1, 201)]
    assert (row["after_warmup"]["threads"], row["after_warmup"]["steps"]) == (0, 0)
    assert row["slope"] == pytest.approx(300, rel=1e-3)
    assert row["growth"] == pytest.approx(300 * (250 - ends[20]), rel=1e-3)
    assert sum(row["seconds"]) == pytest.approx(2.5)
    assert sum(row["cpu_seconds"]) == pytest.approx(5)
    of_tenth = pytest.approx({"median": 800, "low": 800, "high": 800})
    assert row["images_per_second"] == {"first_tenth": of_tenth, "last_tenth": of_tenth}
    assert row["ratio"] == pytest.approx(1)
    assert (row["replicas"], row["losses"]) == (SOUND, [2.0, 0.5])


def test_each_candidate_on_each_number_of_devices(command, play, tmp_path):
    both = ["gluonpar", "gluonpar trainer"]
    for i, name in enumerate(both):
        play(actor(loss=i), name)
    path = tmp_path / "soak.json"
    arguments = ("--num-gpus", "2,3", "--candidates", ",".join(both), "--json", path)
    code, out, err = command(*TINY, "--soak", 100, *arguments)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["losses"][1]) for row in rows] == list(zip(both, (0, 1))) * 2
    two, three = "[cpu(0), cpu(1)]", "[cpu(0), cpu(1), cpu(2)]"
    titles = [line.split(": ")[0] for line in out if " steps in " in line]
    assert titles == [f"{name}, mlp, batch 8 on {on}" for on in (two, three) for name in both]
    assert code == 1 and len(err) == 2  # the actors report two devices only
    assert all(three in line and "not of 3" in line for line in err)


def test_a_soak_that_fails_is_reported(command, play):
    play(actor(then="1 / 0"))
    code, _, err = command(*TINY, "--soak", 100)
    assert code == 1
    assert "failed: gluonpar on mlp, batch 8 on [cpu(0), cpu(1)]: exit code 1" in err[0]
    assert "ZeroDivisionError" in err[-1]


@pytest.mark.slow
class TestPlot:
    def test_the_command_draws_even_what_is_wrong(self, command, play, tmp_path):
        pytest.importorskip("matplotlib")
        play(actor(), threads=lambda i: i)
        path = tmp_path / "soak.png"
        code, _, err = command(*TINY, "--soak", 100, "--plot", path)
        assert (code, len(err)) == (1, 1)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_the_picture_has_a_description(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "soak.svg"
        found = record(resident_bytes=lambda i: 10**8 + 10_000 * i, threads=lambda i: 3 + i // 50)
        soak_chart.draw(path, [found, dataclasses.replace(found, name="another")])
        both = [f"{name}, lenet, batch 4 on [cpu(0), cpu(1)]" for name in ("gluonpar", "another")]
        words = (
            ", over 1000 steps: resident MB: +0.9 over the last nine tenths; threads: 3 after the "
            "warm-up, 5 at the end; descriptors: 7 after the warm-up, 7 at the end; images/s: "
            "median of the last tenth 1.000 of the first."
        )
        text = path.read_text()
        assert f'<title id="title">{"; ".join(both)}</title>' in text
        assert f'<desc id="desc">{both[0]}{words} {both[1]}{words}</desc>' in text

    def test_its_lines_are_the_samples(self, tmp_path, monkeypatch):
        """Of what is drawn: the curve, and the line or the medians beside it."""
        pytest.importorskip("matplotlib")
        figures = []
        monkeypatch.setattr(soak_chart, "save", lambda figure, *_, **__: figures.append(figure))
        found = record(
            resident_bytes=lambda i: 10**8 + 10_000 * i,
            threads=lambda i: 3 + i,
            descriptors=lambda i: 9 - i // 50,
            seconds=lambda i: 0.1 if i < 91 else 0.2,
        )
        soak_chart.draw(tmp_path / "soak.png", [found])
        axes = figures[0].axes
        drawn = [[line.get_xydata().tolist() for line in each.get_lines()] for each in axes]
        steps = range(0, 1001, 10)
        memory, threads, descriptors, images = drawn
        assert memory[0] == [[n, 100 + n / 1000] for n in steps]
        assert np.ravel(memory[1]) == pytest.approx([110, 100.11, 1000, 101])
        assert threads == [[[n, 3 + n // 10] for n in steps]]
        assert descriptors == [[[n, 9 - n // 500] for n in steps]]
        assert np.ravel(images[0]) == pytest.approx(
            np.ravel([[n, 400 if n < 910 else 200] for n in steps[1:]])
        )
        assert np.ravel(images[1:]) == pytest.approx([0, 400, 100, 400, 900, 200, 1000, 200])
        assert {each.get_ylim()[0] for each in axes} == {0}


@pytest.fixture
def plant(monkeypatch):
    """Return plant(statements): gluonpar's real process executes them after each step."""

    def planted(statements):
        def launch(job):
            job.start([job.python, str(PLANTED), statements, job.worker()[-1]])

        changed = dataclasses.replace(CANDIDATES[OURS], launch=launch)
        monkeypatch.setitem(CANDIDATES, OURS, changed)

    return planted


# Soaks of 100 steps after 300 in which MXNet's pool of workspaces grows to what it needs.
WARM = dataclasses.replace(SETTING, warmup=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statements", "complaint"),
    [
        ("", None),
        ("import os\nif count % 10 == 0: kept.append(os.open(os.devnull, 0))", "descriptors"),
        (
            "import threading\nif count == 350:\n"
            " threading.Thread(target=threading.Event().wait, daemon=True).start()",
            "threads",
        ),
        ("kept.append(b'1' * 500_000)", "memory"),
        (
            "import numpy as np\nif count == 400:\n param = self.device_params[1][2]\n"
            " value = param.asnumpy()\n value[0] = np.nextafter(value[0], 9)\n param[:] = value",
            "replicas",
        ),
        ("if count > 390: clock.seconds += 0.001", "throughput"),
    ],
    ids=["nothing", "descriptors", "threads", "memory", "replicas", "throughput"],
)
def test_what_is_planted_in_the_real_process_is_found(plant, statements, complaint):
    plant(statements)
    result = soak.soak(WARM, 100)
    assert set(result.complaints) == ({complaint} if complaint else set())
    warm, end = result.warm, result.samples[-1]
    planted = complaint or ""
    assert end.descriptors - warm.descriptors == 10 * (planted == "descriptors")
    assert end.threads - warm.threads == (planted == "threads")
    assert result.replicas == {**SOUND, "differing": int(planted == "replicas")}
    assert result.ratio == pytest.approx(0.01 / 0.011 if planted == "throughput" else 1)
    if planted == "memory":  # 500,000 bytes a step; what MXNet's pools take meanwhile is less
        assert result.line[0] == pytest.approx(500_000, rel=0.1)
    assert [sample.steps for sample in result.samples] == list(range(1, 101))
    assert sum(sample.cpu_seconds for sample in result.samples) == pytest.approx(
        2 * sum(sample.seconds for sample in result.samples)
    )


@pytest.mark.slow
def test_nan_on_all_devices_alike_is_found(plant):
    plant("if count == 360:\n for params in self.device_params: params[7][:1] = float('nan')")
    result = soak.soak(WARM, 100)
    assert set(result.complaints) == {"finite", "loss"}
    assert result.replicas["not_finite"] > 0
    assert result.replicas["differing"] == 0


@pytest.mark.slow
def test_a_soak_of_gluonpars_trainer():
    result = soak.soak(WARM, 100, "gluonpar trainer")
    assert set(result.complaints) <= {"throughput"}  # by the real clock, of a machine in use
    assert result.replicas == SOUND
    assert result.losses[1] < result.losses[0]
    assert result.samples[-1].resident_bytes > 1e7
    assert result.title == "gluonpar trainer, lenet, batch 4 on [cpu(0), cpu(1)]"
