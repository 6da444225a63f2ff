"""The soak of the training benchmark: what grows, stops or drifts is found out, noise is not."""

import dataclasses
import json
import math
import mmap
import pathlib
import sys
import threading
import types

import bench_tools
import mxnet as mx
import numpy as np
import pytest
from bench_tools import actor, played_by

import benchmarks.training
from benchmarks.training import (
    alike,
    candidates,
    gluon,
    ours,
    panels,
    soak,
    tables,
    vitals,
    worker,
    workloads,
)
from benchmarks.training.candidates import Setting
from benchmarks.training.steady import Sample, Soak
from benchmarks.training.training import Training

TINY = ("--device", "cpu", "--workload", "mlp", "--batch-size", "8", "--warmup", "1")
CPUS = [("cpu", 0), ("cpu", 1)]
TWO = [mx.cpu(0), mx.cpu(1)]
SETTING = Setting("lenet", TWO, batch_size=4)
SOUND = {"devices": 2, "parameters": 8, "differing": 0, "not_finite": 0}
PLANTED = pathlib.Path(__file__).parents[1] / "support" / "planted_worker.py"


@pytest.fixture
def command(capsys):
    return bench_tools.runner(bench_tools.load("bench_training"), capsys)


def record(number=100, replicas=SOUND, losses=(2.0, 1.0), **changed):
    """A soak of ``number`` samples of 10 steps, sound but for what a function of i changes."""
    usual = {"seconds": 0.1, "cpu_seconds": 0.2, "resident_bytes": 10**8}
    usual.update(threads=3, descriptors=7)

    def sample(i):
        return Sample(10 * i, **{k: changed.get(k, lambda i, v=v: v)(i) for k, v in usual.items()})

    warm, *samples = map(sample, range(number + 1))
    return Soak("gluonpar", SETTING, warm, samples, replicas, losses)


def only(soak_):
    """The one complaint."""
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
        assert key == "memory"
        assert words == "memory grew by 12.0 MB over the last nine tenths, more than 8 MB"

    @pytest.mark.parametrize("what", ["threads", "descriptors"])
    @pytest.mark.parametrize("end", [2, 4])
    def test_the_end_has_as_many_as_the_warm_up_left(self, what, end):
        found = record(**{what: lambda i: end if i == 100 else 3})
        assert only(found) == (what, f"{end} {what} at the end, but 3 after the warm-up")
        assert record(**{what: lambda i: end if 1 < i < 100 else 3}).complaints == {}
        assert set(record(**{what: lambda i: end if i else 3}).complaints) == {what}

    def test_all_devices_replicas_are_the_same_and_finite(self):
        differ, infinite, one = (
            record(replicas={**SOUND, **changed})
            for changed in ({"differing": 3}, {"not_finite": 2}, {"devices": 1})
        )
        assert only(differ) == ("replicas", "3 of 8 parameters differ between devices")
        assert only(infinite) == ("finite", "2 of 8 parameters are not finite")
        assert only(one) == ("replicas", "replicas of 1 devices were compared, not of 2")

    @pytest.mark.parametrize("last", [2.0, 3.0, math.nan])
    def test_it_trains(self, last):
        key, words = only(record(losses=(2.0, last)))
        assert (key, words) == ("loss", f"the loss did not fall: 2.0000 at first, {last:.4f} at "
                                "the end")  # fmt: skip

    def test_throughput_is_the_median_of_each_tenth(self):
        times = {3: 9.0, 100: 9.0, 50: 9.0}  # s: outliers in either tenth, and between
        found = record(seconds=lambda i: times.get(i, 0.1 if i <= 90 else 0.1025))
        first, last = found.throughput
        assert first == pytest.approx((400, 400, 400))  # 10 steps of 4 images in 0.1 s
        assert last == pytest.approx((40 / 0.1025,) * 3)
        assert found.ratio == pytest.approx(0.1 / 0.1025)
        assert found.complaints == {}

    def test_quartiles_tell_the_noise(self):
        found = record(seconds=lambda i: 0.1 * (1 + i % 4) if i <= 10 else 0.1)
        # 1 2 3 4 a quarter each, but 10 is no multiple of 4: 1 2 3 4 1 2 3 4 1 2, shifted by one
        images = np.array([40 / (0.1 * (1 + i % 4)) for i in range(1, 11)])
        assert found.throughput[0] == pytest.approx(np.percentile(images, (50, 25, 75)))
        first = found.throughput[0]
        assert str(first) == f"{first.median:.4g} (quartiles {first.low:.4g} to {first.high:.4g})"

    def test_a_slow_down_is_wrong_and_shown_as_what_it_is(self):
        assert record(seconds=lambda i: 0.1 if i < 91 else 0.1 / 0.9701).complaints == {}
        slow = record(
            seconds=lambda i: 0.1 if i < 91 else 0.2,
            cpu_seconds=lambda i: 0.2 if i < 91 else 0.21,
        )
        assert only(slow) == (
            "throughput",
            "images/s of the last tenth are 0.500 of the first's, less than 0.97: median 400 "
            "(quartiles 400 to 400), then 200 (quartiles 200 to 200); a step took 20.00 ms of "
            "the processors' time, then 21.00",
        )
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

    def test_what_is_printed(self):
        found = record(threads=lambda i: 5 if i == 50 else 3, seconds=lambda i: 0.1)
        assert tables.soaked(found) == [
            "gluonpar, lenet, batch 4 on [cpu(0), cpu(1)]: 1000 steps in 10 s, 100 samples",
            "  memory: resident 100.0 MB after the warm-up, 100.0 MB at the end, at most 100.0 MB; "
            "over the last nine tenths +0 bytes/step, +0.0 MB in all (more than 8 MB is wrong)",
            "  threads: 3 after the warm-up, 3 at the end, 3 to 5 in between",
            "  descriptors: 7 after the warm-up, 7 at the end, 7 in between",
            "  replicas: on 2 devices 8 of 8 parameters identical to the bit, 0 not finite; loss "
            "2.0000 at first, 1.0000 at the end",
            "  images/s: median 400 (quartiles 400 to 400) in the first tenth, 400 (quartiles 400 "
            "to 400) in the last: 1.000 of it (less than 0.97 is wrong)",
            "  processors: a step takes 20.00 ms of their time in the first tenth, 20.00 in the "
            "last (medians); the machine's other work is not in it",
        ]


class TestReplicas:
    def test_they_are_compared_by_their_bits(self):
        a, b = np.float32([1, 2]), np.float32([[3]])
        ulp = np.nextafter(a, np.float32(9))
        assert alike.compare([[a, b], [a.copy(), b.copy()]]) == {**SOUND, "parameters": 2}
        for other in (ulp, a.astype("float64"), a[:1], a.reshape(1, 2)):
            for devices in ([a, other, a], [a, a, other], [other, a, a]):
                found = alike.compare([[value, b] for value in devices])
                assert (found["devices"], found["differing"]) == (3, 1)

    def test_a_value_that_is_not_finite_is_found_on_any_device(self):
        a = np.float32([1, 2])
        for value in (np.nan, np.inf, -np.inf):
            bad = np.float32([1, value])
            assert alike.compare([[a, bad], [a, bad]]) == {**SOUND, "parameters": 2,
                                                           "not_finite": 1}  # fmt: skip
            found = alike.compare([[a, a], [a, bad]])
            assert (found["differing"], found["not_finite"]) == (1, 1)

    @pytest.mark.parametrize("made", [ours, gluon])
    def test_a_training_shows_its_own(self, made, monkeypatch):
        monkeypatch.setitem(workloads.WORKLOADS, "resnet18", workloads.resnet18(8))
        task = workloads.task("resnet18", 4, CPUS)
        training = made.make(task)
        training.run(1)
        replicas = training.values()
        sizes = [[value.size for value in of] for of in replicas]
        assert sizes == [[value.size for value in task.params]] * 2
        # Moving statistics differ, as each device's shard does, and are not among them.
        assert alike.compare(replicas) == {**SOUND, "parameters": len(task.params)}
        if made is ours:
            param = training.device_params[1][3]
        else:
            param = training.trained[3].data(mx.cpu(1))
        param[:1] += 1
        assert alike.compare(training.values())["differing"] == 1


class TestVitals:
    def test_a_descriptor_counts_while_it_is_open(self, tmp_path):
        before = vitals.now()["descriptors"]
        assert before >= 3
        with open(tmp_path / "file", "w"), open(tmp_path / "file"):
            assert vitals.now()["descriptors"] == before + 2
        assert vitals.now()["descriptors"] == before

    def test_a_thread_counts_while_it_runs(self):
        before, goes_on = vitals.now()["threads"], threading.Event()
        threads = [threading.Thread(target=goes_on.wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        during = vitals.now()["threads"]
        goes_on.set()
        for thread in threads:
            thread.join()
        assert during == before + 3

    def test_memory_counts_once_it_is_touched(self):
        num_bytes = 64 << 20
        with mmap.mmap(-1, num_bytes) as pages:
            before = vitals.now()["resident_bytes"]
            for start in range(0, num_bytes, mmap.PAGESIZE):
                pages[start] = 1
            grown = vitals.now()["resident_bytes"] - before
            assert vitals.peak_bytes() >= vitals.now()["resident_bytes"] > num_bytes
        assert grown == pytest.approx(num_bytes, rel=0.05)
        assert vitals.now()["resident_bytes"] < before + num_bytes / 2

    def test_a_system_that_does_not_tell_is_refused(self, monkeypatch):
        monkeypatch.setattr(vitals, "status", lambda name: 0)
        with pytest.raises(ValueError, match="soak=100 reads /proc, which only Linux has"):
            soak.check(100, ["gluonpar"])


def test_the_worker_s_seconds_are_of_the_steps_and_their_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "bench_training", benchmarks.training)
    clock = types.SimpleNamespace(seconds=0.0)

    class Sleeps(Training):
        def step(self):
            clock.seconds += 1

        def wait(self):
            clock.seconds += 100

    now = types.SimpleNamespace(
        perf_counter=lambda: clock.seconds, process_time=lambda: 2 * clock.seconds
    )
    monkeypatch.setattr(worker, "time", now)
    answer = worker.trained(Sleeps(), 7)
    assert (answer["seconds"], answer["cpu_seconds"]) == (107, 214)
    assert set(answer) == {f.name for f in dataclasses.fields(Sample)} - {"steps"}


LATE = "1 if total > 401 else 0"  # after the first samples of 1000 steps


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({}, ""),
        ({"trained": {"resident_bytes": "10**8 - 5000 * total"}}, ""),
        (
            {"trained": {"resident_bytes": "10**8 + 20_000 * total"}},
            "memory grew by 17.9 MB over the last nine tenths, more than 8 MB",
        ),
        (
            {"trained": {"threads": f"3 + ({LATE})"}},
            "4 threads at the end, but 3 after the warm-up",
        ),
        (
            {"trained": {"descriptors": f"7 - ({LATE})"}},
            "6 descriptors at the end, but 7 after the warm-up",
        ),
        ({"replicas": {**SOUND, "differing": 1}}, "1 of 8 parameters differ between devices"),
        ({"replicas": {**SOUND, "not_finite": 8}}, "8 of 8 parameters are not finite"),
        ({"loss": 2.0}, "the loss did not fall: 2.0000 at first, 2.0000 at the end"),
        (
            {"trained": {"seconds": f"steps * (0.01 + 0.01 * ({LATE}))"}},
            "images/s of the last tenth are 0.500 of the first's, less than 0.97: median 800 "
            "(quartiles 800 to 800), then 400 (quartiles 400 to 400); a step took 20.00 ms of the "
            "processors' time, then 20.00",
        ),
    ],
)
def test_exit_code_and_line_of_each_fault(command, monkeypatch, tmp_path, changed, complaint):
    played_by(monkeypatch, gluonpar=actor(**changed))
    path = tmp_path / "soak.json"
    code, out, err = command(*TINY, "--soak", 1000, "--json", path)
    title = "gluonpar, mlp, batch 8 on [cpu(0), cpu(1)]: "
    assert [line.partition(": ")[2] for line in err] == ([title + complaint] if complaint else [])
    assert code == (1 if complaint else 0)
    assert out[3].startswith(f"{title}1000 steps in 1") and out[3].endswith(" s, 200 samples")
    [row] = json.loads(path.read_text())["rows"]
    assert row["wrong"] is bool(complaint)
    assert list(row["complaints"].values()) == ([complaint] if complaint else [])


def test_what_is_kept_as_json(command, monkeypatch, tmp_path):
    trained = {"resident_bytes": "100_000 + 300 * total", "threads": "total", "descriptors": "9"}
    played_by(monkeypatch, gluonpar=actor(trained=trained, loss=0.5))
    path = tmp_path / "soak.json"
    command(*TINY, "--soak", 250, "--warmup", 10, "--json", path)
    [row] = json.loads(path.read_text())["rows"]
    ends = [250 * i // 200 for i in range(1, 201)]
    assert row["steps"] == ends
    assert row["threads"] == [10 + end for end in ends]
    assert row["resident_bytes"] == [100_000 + 300 * (10 + end) for end in ends]
    assert row["after_warmup"]["threads"] == 10
    assert row["after_warmup"]["steps"] == 0
    assert row["slope"] == pytest.approx(300)
    assert row["growth"] == pytest.approx(300 * (250 - ends[20]))
    assert sum(row["seconds"]) == pytest.approx(2.5)
    assert sum(row["cpu_seconds"]) == pytest.approx(5)
    of_tenth = {"median": 800, "low": 800, "high": 800}
    assert row["images_per_second"] == {
        "first_tenth": pytest.approx(of_tenth),
        "last_tenth": pytest.approx(of_tenth),
    }
    assert row["ratio"] == pytest.approx(1)
    assert (row["replicas"], row["losses"]) == (SOUND, [2.0, 0.5])


def test_each_candidate_on_each_number_of_devices(command, monkeypatch, tmp_path):
    both = {name: actor(loss=i) for i, name in enumerate(["gluonpar", "gluonpar trainer"])}
    played_by(monkeypatch, **both)
    path = tmp_path / "soak.json"
    arguments = ("--num-gpus", "2,3", "--candidates", ",".join(both), "--json", path)
    code, out, err = command(*TINY, "--soak", 100, *arguments)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["name"], row["losses"][1]) for row in rows] == list(zip(both, (0, 1))) * 2
    titles = [line.split(": ")[0] for line in out if " steps in " in line]
    three = "mlp, batch 8 on [cpu(0), cpu(1), cpu(2)]"
    two = "mlp, batch 8 on [cpu(0), cpu(1)]"
    assert titles == [f"{name}, {on}" for on in (two, three) for name in both]
    # The actors tell of two devices only.
    assert [line.split(": ")[1:] for line in err] == [
        [f"{name}, {three}", "replicas of 2 devices were compared, not of 3"] for name in both
    ]
    assert code == 1


def test_a_soak_that_dies_is_reported(command, monkeypatch):
    played_by(monkeypatch, gluonpar=actor(then="1 / 0"))
    code, _, err = command(*TINY, "--soak", 100)
    assert code == 1
    assert "failed: gluonpar on mlp, batch 8 on [cpu(0), cpu(1)]: exit code 1" in err[0]
    assert "ZeroDivisionError" in err[-1]


class TestPlot:
    def test_the_command_draws_even_what_is_wrong(self, command, monkeypatch, tmp_path):
        pytest.importorskip("matplotlib")
        played_by(monkeypatch, gluonpar=actor(trained={"threads": "total"}))
        path = tmp_path / "soak.png"
        code, _, err = command(*TINY, "--soak", 100, "--plot", path)
        assert (code, len(err)) == (1, 1)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_the_picture_says_what_it_shows(self, tmp_path):
        pytest.importorskip("matplotlib")
        path = tmp_path / "soak.svg"
        found = record(resident_bytes=lambda i: 10**8 + 10_000 * i, threads=lambda i: 3 + i // 50)
        panels.draw(path, [found, dataclasses.replace(found, name="another")])
        both = [f"{name}, lenet, batch 4 on [cpu(0), cpu(1)]" for name in ("gluonpar", "another")]
        words = (
            ", over 1000 steps: resident MB: +0.9 over the last nine tenths; threads: 3 after the "
            "warm-up, 5 at the end; descriptors: 7 after the warm-up, 7 at the end; images/s: "
            "median of the last tenth 1.000 of the first."
        )
        text = path.read_text()
        assert f'<title id="title">{"; ".join(both)}</title>' in text
        assert f'<desc id="desc">{both[0]}{words} {both[1]}{words}</desc>' in text

    def test_its_lines_are_the_samples(self):
        """Of what is drawn: the curve, and the line or the medians beside it."""
        figure = pytest.importorskip("matplotlib.figure").Figure()
        found = record(
            resident_bytes=lambda i: 10**8 + 10_000 * i,
            threads=lambda i: 3 + i,
            descriptors=lambda i: 9 - i // 50,
            seconds=lambda i: 0.1 if i < 91 else 0.2,
        )
        panels._panels(figure, found)
        drawn = [[line.get_xydata().tolist() for line in axes.get_lines()] for axes in figure.axes]
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
        assert {axes.get_ylim()[0] for axes in figure.axes} == {0}

    def test_it_is_transparent_and_the_same_each_time(self, tmp_path):
        Image = pytest.importorskip("PIL.Image")
        pytest.importorskip("matplotlib")
        for name in ("a.svg", "b.svg", "a.png"):
            panels.draw(tmp_path / name, [record()])
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
        alpha = np.asarray(Image.open(tmp_path / "a.png").convert("RGBA"))[..., 3]
        assert (alpha == 0).mean() > 0.5
        assert (alpha == 255).any()


@pytest.fixture
def plant(monkeypatch):
    """plant(statements): gluonpar's real process, with these after each step."""

    def planted(statements):
        argv, env = real(candidates.OURS, SETTING)
        monkeypatch.setattr(
            soak, "launch", lambda *_: ([argv[0], str(PLANTED), statements, argv[-1]], env)
        )

    real = candidates.launch
    return planted


# Soaks of 100 steps after 300 in which MXNet's pool of workspaces grows to what it needs.
WARM = dataclasses.replace(SETTING, warmup=300)


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
def test_what_is_planted_in_the_real_thing_is_found(plant, statements, complaint):
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


def test_nan_on_all_devices_alike_is_found(plant):
    plant("if count == 360:\n for params in self.device_params: params[7][:1] = float('nan')")
    result = soak.soak(WARM, 100)
    assert set(result.complaints) == {"finite", "loss"}
    assert result.replicas["not_finite"] > 0
    assert result.replicas["differing"] == 0


def test_gluonpar_s_trainer_can_be_soaked():
    result = soak.soak(WARM, 100, "gluonpar trainer")
    assert set(result.complaints) <= {"throughput"}  # by the real clock, of a machine in use
    assert result.replicas == SOUND
    assert result.losses[1] < result.losses[0]
    assert result.samples[-1].resident_bytes > 1e7
    assert result.title == "gluonpar trainer, lenet, batch 4 on [cpu(0), cpu(1)]"
