"""Workloads: what is evaluated and saved, on one device and on several."""

import mxnet as mx
import numpy as np
import pytest

from gluonpar.training import Configuration, workloads
from gluonpar.training.data import dataset


@pytest.fixture
def data():
    return dataset.synthetic(num_train=24, num_test=8)


@pytest.mark.parametrize("model", workloads.WORKLOADS)
@pytest.mark.parametrize("k", [1, 2])
def test_what_is_saved_is_what_was_trained_with_the_devices_mean_statistics(
    model, k, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(workloads.ResNet18Workload, "width", 2)
    mx.random.seed(0)
    ctx = [mx.cpu(i) for i in range(k)]
    made = workloads.WORKLOADS[model](ctx, Configuration(num_gpus=k, device="cpu", model=model))
    for _ in range(2):  # the first step begins with the first device's values on all
        made.step(data.train_images, data.train_labels, 24, 0.1)
    mx.nd.waitall()  # backward writes the running statistics, which a reader does not wait for
    params = [] if model == "lenet" else [*made.trained.collect_params().values()]
    statistics = [param for param in params if param.name.endswith(("mean", "var"))]
    before = [[copy.asnumpy() for copy in param.list_data()] for param in statistics]
    apart = [not np.array_equal(*copies) for copies in before if k == 2]
    assert any(apart) == (k == 2 and model != "lenet")
    share = made.accuracy(data.test_images, data.test_labels)
    for param, copies in zip(statistics, before):
        for copy in param.list_data():
            np.testing.assert_allclose(copy.asnumpy(), np.mean(copies, axis=0), rtol=1e-6)
    assert share in [n / 8 for n in range(9)]
    made.save(tmp_path / "params")
    saved = [array.asnumpy() for array in mx.nd.load(str(tmp_path / "params")).values()]
    trained = [copies[-1].asnumpy() for copies in made.copies]
    for want in trained:
        assert any(array.tobytes() == want.tobytes() for array in saved)
    pytest.importorskip("onnx")
    made.save_onnx(tmp_path / "onnx")
    assert (tmp_path / "onnx").stat().st_size > sum(array.nbytes for array in trained)
