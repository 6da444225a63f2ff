"""Configuration: the values that the options may have."""

import math
from pathlib import Path

import numpy as np
import pytest

import gluonpar
from gluonpar.training import Configuration


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ValueError, {"model": "alexnet"}, "model must be one of lenet, resnet18, got 'alexnet'"),
        (ValueError, {"lr": math.nan}, "lr .*nan"),
        (ValueError, {"seed": 2**31}, "seed .*2147483648"),
        (ValueError, {"early_stop": 0}, "early_stop must be at least 1, got 0"),
        (TypeError, {"num_gpus": "2"}, "num_gpus must be an integer, got '2'"),
        (TypeError, {"num_gpus": 2.0}, "num_gpus must be an integer, got 2.0"),
        (TypeError, {"batch_size": None}, "batch_size must be an integer, got None"),
        (TypeError, {"limit": True}, "limit must be an integer, got True"),
        (TypeError, {"resume": True}, "resume must be a string, got True"),
        (TypeError, {"lr": "fast"}, "lr must be a number, got 'fast'"),
        (TypeError, {"gpus": "02"}, "gpus must be a list of integers, got '02'"),
        (TypeError, {"onnx": 1}, "onnx must be True or False, got 1"),
    ],
)
def test_values_that_are_not_possible_or_of_another_type_are_refused(error, options, words):
    with pytest.raises(error, match=words):
        gluonpar.train(**options)


def test_paths_lists_and_numpys_numbers_are_taken():
    given = Configuration(np.int64(3), lr=np.float32(0.5), gpus=[0, 2], data_dir=Path("a"))
    assert (given.num_gpus, given.lr, given.gpus, given.data_dir) == (3, 0.5, (0, 2), "a")


def test_the_default_learning_rate_is_the_models():
    assert (Configuration().lr, Configuration(model="resnet18").lr) == (0.2, 0.1)
