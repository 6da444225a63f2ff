"""Adapts ``gluon.contrib.estimator.Estimator`` to several devices, and its steps to all ranks."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
from mxnet import autograd
from mxnet.gluon.contrib import estimator

from gluonpar import cluster
from gluonpar.gluon import Trainer
from gluonpar.runtime import devices, private_fields
from gluonpar.sharding import split_and_load
from gluonpar.tasks import run_tasks


class BatchProcessor(estimator.BatchProcessor):
    """Runs an Estimator's forward and backward of a batch in :func:`run_tasks`.

    Pass it as ``Estimator(..., batch_processor=gluonpar.BatchProcessor())``. Networks with
    :class:`SyncBatchNorm` need it on CPU contexts. Batches are split by :func:`split_and_load`,
    so their size need not be a multiple of the number of devices.

    In a job of several processes each rank gives its part of every batch, which may be without
    samples, as :class:`gluonpar.DataLoader` does. A step waits for the numbers of samples of all
    ranks, and divides by their sum; metrics, losses and validation use the rank's own samples.
    """

    def _get_data_and_label(self, batch: Any, ctx: Any, batch_axis: int = 0) -> tuple[list, list]:
        data, label, *_ = batch  # MXNet's processor does not use further fields either
        shards = split_and_load((data, label), devices.as_list(ctx), batch_axis)
        return [X for X, _ in shards], [y for _, y in shards]

    def fit_batch(
        self, estimator: Any, train_batch: Any, batch_axis: int = 0
    ) -> tuple[list, list, list, list]:
        """Run forward and backward; return data, labels, predictions and losses per device."""

        def forward_backward(shard: tuple) -> tuple:
            X, y = shard
            with autograd.record():
                prediction = estimator.net(X)
                loss = estimator.loss(prediction, y)
            loss.backward()
            return prediction, loss

        data, label = self._get_data_and_label(train_batch, estimator.context, batch_axis)
        shards = list(zip(data, label))
        results = run_tasks(forward_backward, shards, estimator.context)
        return data, label, [scores for scores, _ in results], [loss for _, loss in results]


@private_fields.around(private_fields.STEPS_ESTIMATOR)
def _step(batch_end: Callable, handler: Any, estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """Have ``step`` divide by the number of samples of all ranks whose gradients are summed.

    MXNet's Estimator passes the number of samples of this rank's batch to it.
    """
    if isinstance(estimator.trainer, Trainer):
        losses = kwargs["loss"] if isinstance(kwargs["loss"], list) else [kwargs["loss"]]
        kwargs["loss"] = [_total(estimator.trainer, losses)]
    return batch_end(handler, estimator, *args, **kwargs)


@cluster.in_scope
def _total(owner: Trainer, losses: list) -> np.ndarray:
    """Return an array whose length, which MXNet reads, is the number of losses of all ranks."""
    return np.empty((int(cluster.total(sum(map(len, losses)))), 0))
