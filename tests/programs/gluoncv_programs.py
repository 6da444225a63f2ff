"""gluon-cv: its networks, losses, transforms and parallel helpers, in loops like its scripts'."""

import re

import gluoncv
import mxnet as mx
import numpy as np
from gluoncv.data import batchify
from gluoncv.data.transforms import presets
from gluoncv.model_zoo.rcnn.faster_rcnn.data_parallel import ForwardBackwardTask
from gluoncv.model_zoo.rcnn.faster_rcnn.faster_rcnn import custom_faster_rcnn_fpn
from gluoncv.utils.parallel import DataParallelCriterion, DataParallelModel, Parallel
from mxnet import autograd, gluon

CLASSES = ["disc", "box"]
_FIXED = re.compile("expand_.*_gamma")


def cifar_resnet(ctx, way):
    """gluon-cv: CIFAR ResNet-20, NAG, a learning-rate schedule."""
    net = gluoncv.model_zoo.get_model("cifar_resnet20_v1", classes=10)
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize()
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    options = {"lr_scheduler": schedule, "wd": 1e-4, "momentum": 0.9}
    trainer = way.trainer(net.collect_params(), "nag", options)
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for n in (16, 16, 16, 13):
        images, labels = mx.nd.random.normal(shape=(n, 3, 32, 32)), mx.nd.arange(n) % 10
        data = gluon.utils.split_and_load(images, ctx, even_split=False)
        label = gluon.utils.split_and_load(labels, ctx, even_split=False)
        with autograd.record():
            losses = [loss_of(net(X), y) for X, y in zip(data, label)]
        for loss in losses:
            loss.backward()
        trainer.step(n)
        yield losses, list(net.collect_params().values())


def pictures(count, size):
    """Images of uint8 with one to three boxes each: (height, width, 3) and (boxes, 6)."""
    rng, samples = np.random.RandomState(3), []
    for _ in range(count):
        image = rng.randint(0, 255, (size, size, 3)).astype("uint8")
        corner = rng.uniform(0, size / 2, (rng.randint(1, 4), 2))
        extent = rng.uniform(size / 5, size / 2, corner.shape)
        cls = rng.randint(0, len(CLASSES), (len(corner), 1))
        label = np.hstack([corner, corner + extent, cls, 0 * cls]).astype("float32")
        samples.append((mx.nd.array(image, dtype="uint8"), label))
    return gluon.data.SimpleDataset(samples)


def _ssd(ctx, way, step, **norm):
    name, size = "ssd_512_mobilenet1.0_custom", 96
    plain = gluoncv.model_zoo.get_model(name, classes=CLASSES, pretrained_base=False)
    plain.initialize()
    with autograd.train_mode():
        anchors = plain(mx.nd.zeros((1, 3, size, size)))[2]
    net = gluoncv.model_zoo.get_model(name, classes=CLASSES, pretrained_base=False, **norm)
    net.initialize()
    transform = presets.ssd.SSDDefaultTrainTransform(size, size, anchors)
    stacked = batchify.Tuple(batchify.Stack(), batchify.Stack(), batchify.Stack())
    loader = gluon.data.DataLoader(
        pictures(17, size).transform(transform), 6, batchify_fn=stacked, last_batch="keep"
    )
    net.collect_params().reset_ctx(ctx)
    options = {"learning_rate": 0.001, "wd": 5e-4, "momentum": 0.9}
    trainer = way.trainer(net.collect_params(), "sgd", options)
    net.hybridize(static_alloc=True, static_shape=True)
    for batch in loader:
        parts = [gluon.utils.split_and_load(part, ctx, even_split=False) for part in batch]
        losses = step(net, *parts)
        trainer.step(1)
        # Gammas that the network fixes at 1 have gradients that nothing writes.
        yield losses, [p for p in net.collect_params().values() if not _FIXED.search(p.name)]


def _ssd_step(multibox):
    def step(net, data, cls, box):
        with autograd.record():
            outputs = [net(x) for x in data]
            cls_preds, box_preds = [out[0] for out in outputs], [out[1] for out in outputs]
            total, cls_loss, box_loss = multibox(cls_preds, box_preds, cls, box)
        autograd.backward(total)
        return [*cls_loss, *box_loss]

    return step


def ssd(ctx, way):
    """gluon-cv: SSD; one loss for all devices, which reads the number of boxes."""
    return _ssd(ctx, way, _ssd_step(gluoncv.loss.SSDMultiBoxLoss()))


def ssd_contrib(ctx, way):
    """gluon-cv: SSD with MXNet's own SyncBatchNorm."""
    norm = {"norm_layer": gluon.contrib.nn.SyncBatchNorm, "norm_kwargs": {"num_devices": len(ctx)}}
    return _ssd(ctx, way, _ssd_step(gluoncv.loss.SSDMultiBoxLoss()), **norm)


def ssd_synchronised(ctx, way):
    """gluon-cv: SSD with gluonpar's SyncBatchNorm."""
    import gluonpar

    multibox = gluoncv.loss.SSDMultiBoxLoss()

    def step(net, data, cls, box):
        with autograd.record():
            outputs = gluonpar.run_tasks(net, data, ctx)
            cls_preds, box_preds = [out[0] for out in outputs], [out[1] for out in outputs]
            total, cls_loss, box_loss = multibox(cls_preds, box_preds, cls, box)
        gluonpar.run_tasks(lambda loss: loss.backward(), total, ctx)
        return [*cls_loss, *box_loss]

    norm = {"norm_layer": gluonpar.SyncBatchNorm, "norm_kwargs": {"num_devices": len(ctx)}}
    return _ssd(ctx, way, step, **norm)


def yolo(ctx, way):
    """gluon-cv: YOLOv3, which computes its own losses."""
    net = gluoncv.model_zoo.get_model(
        "yolo3_mobilenet1.0_custom", classes=CLASSES, pretrained_base=False
    )
    net.initialize()
    size = 64
    transform = presets.yolo.YOLO3DefaultTrainTransform(size, size, net)
    stacked = batchify.Tuple(
        *[batchify.Stack() for _ in range(6)], batchify.Pad(axis=0, pad_val=-1)
    )
    loader = gluon.data.DataLoader(
        pictures(17, size).transform(transform), 6, batchify_fn=stacked, last_batch="keep"
    )
    net.collect_params().reset_ctx(ctx)
    options = {"learning_rate": 0.001, "wd": 5e-4, "momentum": 0.9}
    trainer = way.trainer(net.collect_params(), "sgd", options)
    for batch in loader:
        parts = [gluon.utils.split_and_load(part, ctx, even_split=False) for part in batch]
        data, *fixed_targets, gt_boxes = parts
        losses = []
        with autograd.record():
            for i, x in enumerate(data):
                losses.extend(net(x, gt_boxes[i], *[target[i] for target in fixed_targets]))
        autograd.backward(losses)
        trainer.step(len(batch[0]))
        yield losses, list(net.collect_params().values())


def _write_all_regions(F):
    """Have ROIAlign write zeros for regions that are padding; on CPUs it leaves them unwritten."""
    align = F.contrib.ROIAlign

    def written(data, rois, *args, **kwargs):
        out = align(data, rois, *args, **kwargs)
        valid = F.reshape(F.slice_axis(rois, axis=1, begin=0, end=1) >= 0, shape=(-1, 1, 1, 1))
        return F.where(F.broadcast_like(valid, out), out, F.zeros_like(out))

    F.contrib.ROIAlign = written


_write_all_regions(mx.nd)
_write_all_regions(mx.sym)


def faster_rcnn(ctx, way):
    """gluon-cv: Faster R-CNN with a feature pyramid, by ForwardBackwardTask."""
    net = custom_faster_rcnn_fpn(
        classes=CLASSES,
        transfer=None,
        dataset="ours",
        pretrained_base=False,
        base_network_name="resnet18_v1b",
        norm_layer=gluon.nn.BatchNorm,
        num_fpn_filters=32,
        num_box_head_conv=0,
        num_box_head_dense_filters=64,
        short=96,
        max_size=128,
        min_stage=2,
        max_stage=6,
        strides=(4, 8, 16, 32, 64),
        scales=(2, 4, 8, 16, 32),
        roi_size=(7, 7),
        rpn_channel=32,
        rpn_train_pre_nms=200,
        rpn_train_post_nms=64,
        num_sample=16,
        max_num_gt=4,
        per_device_batch_size=1,
        alloc_size=(64, 64),
    )
    net.initialize()
    transform = presets.rcnn.FasterRCNNDefaultTrainTransform(
        96, 128, net, ashape=64, multi_stage=True
    )
    loader = gluon.data.DataLoader(
        pictures(3 * len(ctx), 96).transform(transform),
        len(ctx),
        batchify_fn=batchify.FasterRCNNTrainBatchify(net, len(ctx)),
    )
    net.collect_params().reset_ctx(ctx)
    options = {"learning_rate": 0.001, "wd": 1e-4, "momentum": 0.9}
    trainer = way.trainer(net.collect_train_params(), "sgd", options)
    task = ForwardBackwardTask(
        net,
        trainer,
        gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=False),
        gluon.loss.HuberLoss(rho=1 / 9.0),
        gluon.loss.SoftmaxCrossEntropyLoss(),
        gluon.loss.HuberLoss(),
        mix_ratio=1.0,
        amp_enabled=False,
    )
    parallel = Parallel(1, task)  # more would draw random numbers in any order
    net.hybridize(static_alloc=True)
    for batch in loader:
        on_devices = [[x.as_in_context(c) for x, c in zip(part, ctx)] for part in batch]
        for shard in zip(*on_devices):
            parallel.put(shard)
        results = [parallel.get() for _ in ctx]
        trainer.step(len(ctx))
        losses = [loss for result in results for loss in result[:4]]
        losses.sort(key=lambda loss: str(loss.context))  # of threads, in any order
        yield losses, list(net.collect_train_params().values())


def _fcn(ctx, way, step, dtype="float32", **norm):
    """FCN with ResNet-50 and an auxiliary loss."""
    size = 32
    net = gluoncv.model_zoo.segbase.get_segmentation_model(
        "fcn", backbone="resnet50", aux=True, pretrained_base=False, crop_size=size, **norm
    )
    net.initialize(ctx=ctx, force_reinit=True)
    net.cast(dtype)
    net.hybridize(static_alloc=True)
    options = {"learning_rate": 0.01, "wd": 1e-4, "momentum": 0.9}
    trainer = way.trainer(net.collect_params(), "sgd", options)
    for n in (6, 6, 5):
        images = mx.nd.random.normal(shape=(n, 3, size, size)).astype(dtype)
        targets = mx.nd.random.randint(-1, 4, shape=(n, size, size)).astype(dtype)
        losses = step(net, images, targets)
        trainer.step(n)
        yield losses, list(net.collect_params().values())


def fcn(ctx, way):
    """gluon-cv: FCN with an auxiliary loss, by DataParallelModel."""
    loss_of = gluoncv.loss.MixSoftmaxCrossEntropyLoss(aux=True)

    def step(net, images, targets):
        net, criterion = DataParallelModel(net, ctx), DataParallelCriterion(loss_of, ctx)
        with autograd.record(True):
            losses = criterion(net(images), targets)
            mx.nd.waitall()
            autograd.backward([loss for of_device in losses for loss in of_device])
        return [loss for of_device in losses for loss in of_device]

    return _fcn(ctx, way, step)


def fcn_synchronised(ctx, way):
    """gluon-cv: FCN with gluonpar's SyncBatchNorm."""
    return _fcn_in_tasks(ctx, way, gluoncv.loss.MixSoftmaxCrossEntropyLoss(aux=True))


def fcn_as_one(ctx, way):
    """A step of FCN with gluonpar's SyncBatchNorm, in float64; on one device with BatchNorm."""
    # gluon-cv's loss divides each device's gradients by the pixels of that device's samples.
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss(axis=1)

    def of_samples(out, auxiliary, y):
        return loss_of(out, abs(y)) + 0.2 * loss_of(auxiliary, abs(y))

    yield next(_fcn_in_tasks(ctx, way, of_samples, "float64"))


def _fcn_in_tasks(ctx, way, loss_of, dtype="float32"):
    import gluonpar

    norm = {"norm_layer": gluonpar.SyncBatchNorm, "norm_kwargs": {"num_devices": len(ctx)}}

    def step(net, images, targets):
        def forward_backward(shard):
            X, y = shard
            with autograd.record():
                loss = loss_of(*net(X), y)
            loss.backward()
            return loss

        if dtype == "float64":  # dropout depends on the number of devices
            net.apply(_without_dropout)
        shards = gluonpar.split_and_load((images, targets), ctx)
        return gluonpar.run_tasks(forward_backward, shards, ctx)

    return _fcn(ctx, way, step, dtype, **(norm if len(ctx) > 1 else {}))


def _without_dropout(block):
    if isinstance(block, gluon.nn.Dropout):
        block._rate = 0
