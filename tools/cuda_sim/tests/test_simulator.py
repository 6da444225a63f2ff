"""The simulated CUDA itself: what a GPU does to programs that are wrong, it must do too.

Each test calls the libraries with ctypes in a process of its own; MXNet is needed only to build.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from cuda_sim import build, environment

# What each test's program starts with: check() raises for an error, buffers are of int64.
START = """
import ctypes, sys
from ctypes import byref, c_int, c_size_t, c_void_p
from cuda_sim import counters, reset, timeline

cudart = ctypes.CDLL("libcudart.so.11.0")
cudart.cudaGetErrorString.restype = cudart.cudaGetErrorName.restype = ctypes.c_char_p
H2D, D2H, D2D = 1, 2, 3
LENGTH = 1 << 16
NUM_BYTES = 8 * LENGTH

def check(error):
    if error:
        raise RuntimeError(cudart.cudaGetErrorName(error).decode())

def name(error):
    return cudart.cudaGetErrorName(error).decode()

def device_array(num_bytes=NUM_BYTES):
    address = c_void_p()
    check(cudart.cudaMalloc(byref(address), c_size_t(num_bytes)))
    return address

def host_array(value=0):
    return (ctypes.c_int64 * LENGTH)(*([value] * LENGTH))

def pinned_array(value=0):
    address = c_void_p()
    check(cudart.cudaHostAlloc(byref(address), c_size_t(NUM_BYTES), 0))
    array = (ctypes.c_int64 * LENGTH).from_address(address.value)
    array[:] = [value] * LENGTH
    return array

def stream():
    handle = c_void_p()
    check(cudart.cudaStreamCreate(byref(handle)))
    return handle

def copy(to, start, kind, on=None, num_bytes=NUM_BYTES):
    return cudart.cudaMemcpyAsync(to, start, c_size_t(num_bytes), kind, on)

def read(address):
    array = host_array()
    check(cudart.cudaMemcpy(array, address, c_size_t(NUM_BYTES), D2H))
    return array

def event():
    handle = c_void_p()
    check(cudart.cudaEventCreateWithFlags(byref(handle), 2))
    return handle

def load(source, architecture=80):
    nvrtc, cuda = ctypes.CDLL("libnvrtc.so.11.2"), ctypes.CDLL("libcuda.so.1")
    program, size, module = c_void_p(), c_size_t(), c_void_p()
    check(nvrtc.nvrtcCreateProgram(byref(program), source.encode(), b"test", 0, None, None))
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture=compute_{architecture}".encode())
    error = nvrtc.nvrtcCompileProgram(program, 1, options)
    if error:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvrtc.nvrtcGetErrorString(error).decode())
    check(nvrtc.nvrtcGetPTXSize(program, byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx))
    check(cuda.cuModuleLoadData(byref(module), ptx))
    function = c_void_p()
    check(cuda.cuModuleGetFunction(byref(function), module, b"kernel"))

    def launch(*arguments, grid=1, block=1, on=None):
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        return cuda.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, on, pointers, None)
    return launch

ADD_ONE = '''
extern "C" __global__ void kernel(long* numbers) {
  numbers[threadIdx.x + blockIdx.x * blockDim.x] += 1;
}'''
"""


@pytest.fixture(scope="session")
def folder():
    """The folder of the libraries; CUDA_SIM_FOLDER names one that is built already."""
    if "CUDA_SIM_FOLDER" in os.environ:
        return build.pathlib.Path(os.environ["CUDA_SIM_FOLDER"])
    try:
        build.build()
    except build.BuildError as error:
        pytest.skip(str(error))
    return build.DEFAULT_FOLDER


@pytest.fixture
def run(folder):
    """run(program, num_devices, **options): run it on simulated GPUs; return the ended process."""

    def run(program, num_devices=2, **options):
        variables = environment(num_devices, folder, **options)
        path = str(build.HERE.parent)
        source = START + textwrap.dedent(program)
        command = [sys.executable, "-X", "faulthandler", "-c", source]
        env = {**os.environ, **variables, "PYTHONPATH": path}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)

    return run


@pytest.fixture
def succeed(run):
    """As run; the program must succeed."""

    def succeed(program, num_devices=2, **options):
        done = run(program, num_devices, **options)
        assert done.returncode == 0, done.stderr
        return done

    return succeed


def test_new_memory_holds_no_zeros(succeed):
    succeed("assert set(read(device_array())) == {-1}")


@pytest.mark.parametrize("access", ["c_int.from_address(x.value).value", "ctypes.memset(x, 0, 8)"])
def test_the_host_cannot_touch_device_memory(run, access):
    done = run(f"x = device_array()\n{access}")
    assert done.returncode == -11 and "Segmentation fault" in done.stderr
    assert "host code touched memory of gpu 0" in done.stderr


def test_memory_is_limited_and_comes_back(succeed):
    succeed(
        """
        address = c_void_p()
        malloc = lambda n: name(cudart.cudaMalloc(byref(address), c_size_t(n)))
        assert malloc(600_000) == "cudaSuccess"
        first = c_void_p(address.value)
        assert malloc(600_000) == "cudaErrorMemoryAllocation"
        assert name(cudart.cudaGetLastError()) == "cudaErrorMemoryAllocation"
        assert name(cudart.cudaGetLastError()) == "cudaSuccess"
        check(cudart.cudaSetDevice(1))
        assert malloc(600_000) == "cudaSuccess"
        check(cudart.cudaSetDevice(0))
        check(cudart.cudaFree(first))
        assert name(cudart.cudaFree(first)) == "cudaErrorInvalidValue"
        free, total = c_size_t(), c_size_t()
        check(cudart.cudaMemGetInfo(byref(free), byref(total)))
        assert free.value == total.value == 1_000_000
        assert malloc(600_000) == "cudaSuccess" and address.value != first.value
        """,
        bytes=1_000_000,
    )


def test_freed_memory_and_what_follows_an_array_cannot_be_copied(succeed):
    succeed(
        """
        x, y = device_array(), device_array()
        assert name(copy(y, x, D2D, num_bytes=NUM_BYTES + 1)) == "cudaErrorInvalidValue"
        assert name(copy(y, x, H2D)) == "cudaErrorInvalidValue"
        check(cudart.cudaFree(x))
        assert name(copy(y, x, D2D)) == "cudaErrorInvalidValue"
        """
    )


# A copy of pinned memory is read when its stream comes to it: some seed shows the value written
# after the call, unless the program waits.
PINNED = """
    x, source, on = device_array(), pinned_array(1), stream()
    for _ in range(20):
        check(copy(x, source, H2D, on))
    {wait}
    source[:] = [2] * LENGTH
    check(cudart.cudaStreamSynchronize(on))
    assert set(read(x)) == {{1}}
"""


@pytest.mark.parametrize("wait", ["cudaStreamSynchronize(on)", "cudaDeviceSynchronize()"])
def test_a_pinned_copy_is_done_after_synchronizing(succeed, wait):
    succeed(PINNED.format(wait=f"check(cudart.{wait})"), delays=1)


def test_a_pinned_copy_is_not_done_before(run):
    runs = (run(PINNED.format(wait=""), delays=seed) for seed in range(20))
    assert any("AssertionError" in ended.stderr for ended in runs)


def test_pageable_memory_may_be_changed_after_the_call(succeed):
    program = PINNED.replace("pinned_array", "host_array")
    succeed(program.format(wait=""), delays=1)


# The second stream reads what the first has written, after much else.
TWO_STREAMS = """
    x, y, ones = device_array(), device_array(), pinned_array(1)
    first, second, ready = stream(), stream(), event()
    for _ in range(20):
        check(cudart.cudaMemsetAsync(x, 0, c_size_t(NUM_BYTES), first))
    check(copy(x, ones, H2D, first))
    check(cudart.cudaEventRecord(ready, first))
    {wait}
    check(copy(y, x, D2D, second))
    check(cudart.cudaStreamSynchronize(second))
    assert set(read(y)) == {{1}}
"""
WAIT = "check(cudart.cudaStreamWaitEvent(second, ready, 0))"


@pytest.mark.parametrize("seed", range(3))
def test_an_event_orders_two_streams(succeed, seed):
    succeed(TWO_STREAMS.format(wait=WAIT), delays=seed)


def test_without_the_event_the_second_stream_reads_too_early(run):
    runs = (run(TWO_STREAMS.format(wait=""), delays=seed) for seed in range(20))
    assert any("AssertionError" in ended.stderr for ended in runs)


@pytest.mark.parametrize("seed", range(3))
def test_the_default_stream_waits_for_the_others_and_they_for_it(succeed, seed):
    succeed(
        """
        x, y, ones = device_array(), device_array(), pinned_array(1)
        first, second = stream(), stream()
        for _ in range(20):
            check(cudart.cudaMemsetAsync(x, 0, c_size_t(NUM_BYTES), first))
        check(copy(x, ones, H2D, first))
        check(copy(y, x, D2D))
        check(cudart.cudaMemsetAsync(x, 0, c_size_t(NUM_BYTES), second))
        check(cudart.cudaDeviceSynchronize())
        assert set(read(y)) == {1} and set(read(x)) == {0}
        """,
        delays=seed,
    )


def test_work_of_a_destroyed_stream_is_done(succeed):
    succeed(
        """
        x, ones, on = device_array(), pinned_array(1), stream()
        for _ in range(20):
            check(cudart.cudaMemsetAsync(x, 0, c_size_t(NUM_BYTES), on))
        check(copy(x, ones, H2D, on))
        check(cudart.cudaStreamDestroy(on))
        assert name(copy(x, ones, H2D, on)) == "cudaErrorInvalidResourceHandle"
        assert set(read(x)) == {1}
        """,
        delays=1,
    )


def test_copies_are_counted_by_kind(succeed):
    succeed(
        """
        x, y, pinned = device_array(), device_array(), pinned_array()
        pageable, on = host_array(), stream()
        reset()
        for to, start, kind in [(x, pinned, H2D), (x, pageable, H2D), (pinned, x, D2H),
                                (pageable, x, D2H), (y, x, D2D), (y, x, D2D)]:
            check(copy(to, start, kind, on))
        check(cudart.cudaStreamSynchronize(on))
        assert counters() == {
            "H2D pinned": (1, NUM_BYTES), "H2D pageable": (1, NUM_BYTES), "D2D": (2, 2 * NUM_BYTES),
            "D2H pinned": (1, NUM_BYTES), "D2H pageable": (1, NUM_BYTES),
            "cudaStreamSynchronize": (1, 0),
        }
        assert [one.name for one in timeline()] == [
            "H2D pinned", "H2D pageable", "D2H pinned", "D2H pageable", "D2D", "D2D"]
        assert {(one.device, one.stream) for one in timeline()} == {(0, 1)}
        assert all(one.begin <= one.end for one in timeline())
        """,
        timeline=1,
    )


PEERS = """
    can, arrays = c_int(), []
    for device in range(4):
        check(cudart.cudaSetDevice(device))
        arrays.append(device_array())

    def enable(device, peer):
        check(cudart.cudaSetDevice(device))
        return name(cudart.cudaDeviceEnablePeerAccess(peer, 0))

    def kind(to, start):
        reset()
        size = c_size_t(NUM_BYTES)
        check(cudart.cudaMemcpyPeerAsync(arrays[to], to, arrays[start], start, size, None))
        return [one for one in counters() if one.startswith("peer")][0]
"""


def test_a_copy_over_a_slow_link_takes_its_time_and_others_do_not(succeed):
    program = """
    assert kind(0, 1) == "peer staged"
    check(cudart.cudaMemsetAsync(arrays[0], 0, c_size_t(NUM_BYTES), None))
    check(cudart.cudaDeviceSynchronize())
    check(cudart.cudaSetDevice(0))
    check(cudart.cudaDeviceSynchronize())
    took = {one.name: one.end - one.begin for one in timeline()}
    assert took["peer staged"] >= 0.5 > took["memset"]
    """
    succeed(PEERS + program, num_devices=4, timeline=1, link=1 << 20)


def test_peer_access_must_be_enabled(succeed):
    program = """
    assert kind(0, 1) == kind(2, 3) == "peer staged"
    assert enable(0, 1) == "cudaSuccess"
    assert enable(0, 1) == "cudaErrorPeerAccessAlreadyEnabled"
    assert kind(0, 1) == kind(1, 0) == "peer direct"
    assert kind(2, 3) == "peer staged"
    """
    succeed(PEERS + program, num_devices=4)


def test_peer_access_may_be_missing_in_hardware(succeed):
    program = """
    for device in range(4):
        for peer in range(4):
            check(cudart.cudaDeviceCanAccessPeer(byref(can), device, peer))
            assert can.value == ({device, peer} in [{0, 1}, {2, 3}])
    assert enable(0, 2) == "cudaErrorPeerAccessUnsupported"
    assert enable(0, 1) == "cudaSuccess"
    """
    succeed(PEERS + program, num_devices=4, peers="0-1,2-3")


FAR_KERNEL = """
    add_one, x = load(ADD_ONE), device_array()
    check(cudart.cudaMemsetAsync(x, 0, c_size_t(NUM_BYTES), None))
    check(cudart.cudaDeviceSynchronize())
    check(cudart.cudaSetDevice(1))
    {enable}
    check(add_one(x))
    check(cudart.cudaDeviceSynchronize())
    assert read(x)[0] == 1
"""


def test_a_kernel_can_use_another_devices_memory_with_peer_access(succeed):
    succeed(FAR_KERNEL.format(enable="check(cudart.cudaDeviceEnablePeerAccess(0, 0))"))


def test_a_kernel_cannot_use_another_devices_memory_without(run):
    done = run(FAR_KERNEL.format(enable=""))
    assert done.returncode == -11
    assert "'kernel' touched memory of gpu 0, to which" in done.stderr


@pytest.mark.parametrize(
    ("before", "grid", "where"),
    [("", "2 * LENGTH", "outside of any array"), ("cudart.cudaFree(x)", "1", "that was released")],
    ids=["beyond", "released"],
)
def test_a_kernel_cannot_touch_what_is_no_array(run, before, grid, where):
    program = f"add_one, x = load(ADD_ONE), device_array()\n{before}\nadd_one(x, grid={grid})"
    done = run(program + "\ncheck(cudart.cudaDeviceSynchronize())")
    assert done.returncode == -11
    assert f"'kernel' touched device memory {where}" in done.stderr


def test_a_kernel_runs_in_its_stream(succeed):
    succeed(
        """
        add_one, on = load(ADD_ONE), stream()
        x = device_array()
        check(cudart.cudaMemsetAsync(x, 0, c_size_t(NUM_BYTES), on))
        for _ in range(5):
            check(add_one(x, grid=LENGTH // 256, block=256, on=on))
        check(cudart.cudaStreamSynchronize(on))
        assert set(read(x)) == {5} and counters()["kernel"].times == 5
        assert name(add_one(x, grid=1, block=2048)) == "cudaErrorInvalidConfiguration"
        assert name(add_one(x, grid=0)) == "cudaErrorInvalidConfiguration"
        check(cudart.cudaSetDevice(1))
        assert name(add_one(x, on=on)) == "cudaErrorInvalidResourceHandle"
        """,
        delays=1,
    )


def test_a_device_that_fails_stays_failed_and_the_others_work(succeed):
    succeed(
        """
        add_one, x = load(ADD_ONE), device_array()
        check(cudart.cudaSetDevice(1))
        y, add_one_to_y = device_array(), load(ADD_ONE)
        for _ in range(2):
            check(add_one_to_y(y))
        check(cudart.cudaDeviceSynchronize())
        check(add_one_to_y(y))
        for _ in range(2):
            assert name(cudart.cudaDeviceSynchronize()) == "cudaErrorIllegalAddress"
            assert name(cudart.cudaGetLastError()) == "cudaErrorIllegalAddress"
        assert name(cudart.cudaFree(y)) == "cudaErrorIllegalAddress"
        check(cudart.cudaSetDevice(0))
        for _ in range(9):
            check(add_one(x))
        check(cudart.cudaDeviceSynchronize())
        """,
        fail_after="1:2",
    )


def test_a_forked_process_cannot_use_the_devices(succeed):
    succeed(
        """
        import os
        x = device_array()
        child = os.fork()
        if child == 0:
            y = c_void_p()
            error = cudart.cudaMalloc(byref(y), c_size_t(8))
            os._exit(0 if name(error) == "cudaErrorInitializationError" else 1)
        assert os.waitpid(child, 0)[1] == 0
        read(x)
        """
    )


@pytest.mark.parametrize(
    ("driver", "nvrtc", "error"),
    [
        ("520.61.05", "11.8", ""),
        ("470.82.01", "11.4", ""),
        ("470.82.01", "11.8", "cudaErrorUnsupportedPtxVersion"),
        ("450.80.02", "11.2", "cudaErrorUnsupportedPtxVersion"),
        ("450.51.06", "11.2", "cudaErrorInsufficientDriver"),
        ("535.54.03", "11.8", ""),
    ],
)
def test_the_driver_decides_which_ptx_it_takes(run, driver, nvrtc, error):
    done = run("load(ADD_ONE); device_array()", driver=driver, nvrtc=nvrtc)
    assert error in done.stderr and (done.returncode == 0) == (not error)


def test_an_old_nvrtc_does_not_know_a_new_architecture(run):
    program = "load(ADD_ONE, architecture=89)"
    assert run(program, nvrtc="11.8", capability="8.9").returncode == 0
    assert "INVALID_OPTION" in run(program, nvrtc="11.2", capability="8.9").stderr


@pytest.mark.parametrize(("visible", "number"), [("1", 1), ("1,0", 2), ("0,7,1", 1), ("", 0)])
def test_devices_can_be_hidden(succeed, monkeypatch, visible, number):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    succeed(f"n = c_int(); cudart.cudaGetDeviceCount(byref(n)); assert n.value == {number}")


@pytest.mark.parametrize(
    ("option", "value"),
    [("bytes", "much"), ("capability", "8"), ("peers", "some"), ("driver", "new")],
)
def test_an_option_that_makes_no_sense_is_refused(run, option, value):
    done = run("device_array()", **{option: value})
    assert done.returncode == -6 and f"CUDA_SIM_{option.upper()} must be" in done.stderr


def test_an_unknown_option_is_refused(folder):
    with pytest.raises(ValueError, match="options must be among .* got gpus"):
        environment(2, folder, gpus=3)
