"""What makes GPUs repeat is set for a time, whatever the environment had, and restored.

tests/gpu_sim/test_programs.py tests that it reaches cuDNN.
"""

import os

import pytest

from gluonpar.runtime import devices


@pytest.mark.parametrize("before", [None, "2"])
def test_the_environment_is_restored_also_after_an_error(before, monkeypatch):
    names = list(devices.DETERMINISTIC)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(names[0], before)
    with pytest.raises(KeyError), devices.deterministic():
        assert {name: os.environ[name] for name in names} == devices.DETERMINISTIC
        raise KeyError("in between")
    assert [os.environ.get(name) for name in names] == [before, None]
