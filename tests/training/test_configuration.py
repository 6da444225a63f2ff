"""Configuration: the values that the options may have."""

import math
from pathlib import Path

import numpy as np
import pytest

import gluonpar
from gluonpar.training import Configuration


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "alexnet"}, "model must be one of lenet, resnet18, got 'alexnet'"),
        ({"lr": math.nan}, "lr .*nan"),
        ({"seed": 2**31}, "seed .*2147483648"),
        ({"early_stop": 0}, "early_stop must be at least 1, got 0"),
    ],
)
def test_values_that_are_not_possible_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Configuration(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpus": "2"}, "num_gpus must be an integer, got '2'"),
        ({"num_gpus": 2.0}, "num_gpus must be an integer, got 2.0"),
        ({"batch_size": None}, "batch_size must be an integer, got None"),
        ({"limit": True}, "limit must be an integer, got True"),
        ({"resume": True}, "resume must be a string, got True"),
        ({"lr": "fast"}, "lr must be a number, got 'fast'"),
        ({"gpus": "02"}, "gpus must be a list of integers, got '02'"),
        ({"onnx": 1}, "onnx must be True or False, got 1"),
    ],
)
def test_values_of_another_type_are_refused(options, words):
    with pytest.raises(TypeError, match=words):
        gluonpar.train(**options)


def test_paths_lists_and_numpys_numbers_are_taken():
    given = Configuration(np.int64(3), lr=np.float32(0.5), gpus=[0, 2], data_dir=Path("a"))
    assert (given.num_gpus, given.lr, given.gpus, given.data_dir) == (3, 0.5, (0, 2), "a")


def test_the_default_learning_rate_is_the_models():
    assert (Configuration().lr, Configuration(model="resnet18").lr) == (0.2, 0.1)
