"""GluonNLP: BERT and the AWD LSTM language model, in loops like its scripts'."""

import gluonnlp
import mxnet as mx
from mxnet import autograd, gluon


def bert(ctx, way):
    """GluonNLP: BERT, BERTAdam, two batches accumulated, gradients clipped."""
    units, words, length = 32, 60, 10
    encoder = gluonnlp.model.BERTEncoder(
        num_layers=2, units=units, hidden_size=64, num_heads=4, max_length=length, dropout=0.1
    )
    model = gluonnlp.model.BERTModel(
        encoder, vocab_size=words, units=units, embed_size=units, token_type_vocab_size=2,
        use_pooler=True, use_decoder=False, use_classifier=False,
    )  # fmt: skip
    net = gluonnlp.model.BERTClassifier(model, num_classes=3, dropout=0.1)
    net.initialize(mx.init.Normal(0.02), ctx=ctx)
    net.hybridize(static_alloc=True)
    options = {"learning_rate": 1e-3, "epsilon": 1e-6, "wd": 0.01}
    trainer = way.trainer(net.collect_params(), "bertadam", options, update_on_kvstore=False)
    params = [param for param in net.collect_params().values() if param.grad_req != "null"]
    for param in net.collect_params(".*beta|.*gamma|.*bias").values():
        param.wd_mult = 0.0
    for param in params:
        param.grad_req = "add"
    loss_of = gluon.loss.SoftmaxCELoss()
    for step, n in enumerate((8, 8, 8, 7, 8, 5)):
        batch = [
            mx.nd.random.randint(0, words, shape=(n, length)).astype("float32"),
            mx.nd.random.randint(0, 2, shape=(n, length)).astype("float32"),
            mx.nd.random.randint(3, length + 1, shape=(n,)).astype("float32"),
            mx.nd.random.randint(0, 3, shape=(n,)).astype("float32"),
        ]
        parts = [gluon.utils.split_and_load(part, ctx, even_split=False) for part in batch]
        losses = []
        with autograd.record():
            for tokens, types, lengths, label in zip(*parts):
                losses.append(loss_of(net(tokens, types, lengths), label).mean() / len(ctx))
        for loss in losses:
            loss.backward()
        if step % 2:
            trainer.allreduce_grads()
            gluonnlp.utils.clip_grad_global_norm(params, 1)
            trainer.update(2)
            net.collect_params().zero_grad()
            yield losses, params


def awd_lstm(ctx, way):
    """GluonNLP: AWD LSTM, hidden states carried on, outputs regularised."""
    words, length = 50, 6
    net = gluonnlp.model.train.AWDRNN(
        "lstm", words, embed_size=16, hidden_size=24, num_layers=2, tie_weights=True,
        dropout=0.2, weight_drop=0.2, drop_h=0.1, drop_i=0.2, drop_e=0.1,
    )  # fmt: skip
    net.initialize(mx.init.Xavier(), ctx=ctx)
    net.hybridize(static_alloc=True)
    trainer = way.trainer(
        net.collect_params(), "sgd", {"learning_rate": 1.0, "wd": 1e-6}, update_on_kvstore=False
    )
    params = list(net.collect_params().values())
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    activation = gluonnlp.loss.ActivationRegularizationLoss(2)
    temporal = gluonnlp.loss.TemporalActivationRegularizationLoss(1)
    batch_size = 4 * len(ctx) - 1  # the last device has one less
    text = mx.nd.random.randint(0, words, shape=(4 * length + 1, batch_size)).astype("float32")
    hiddens = None
    for start in range(0, 4 * length, length):
        parts = [
            gluon.utils.split_and_load(rows, ctx, batch_axis=1, even_split=False)
            for rows in (text[start : start + length], text[start + 1 : start + 1 + length])
        ]
        if hiddens is None:
            hiddens = [
                net.begin_state(X.shape[1], mx.nd.zeros, ctx=c) for X, c in zip(parts[0], ctx)
            ]
        hiddens = _detached(hiddens)
        losses = []
        with autograd.record():
            for j, (X, y) in enumerate(zip(*parts)):
                output, hiddens[j], raw, dropped = net(X, hiddens[j])
                loss = loss_of(output.reshape(-3, -1), y.reshape(-1)).sum()
                loss = loss + activation(*dropped) + temporal(*raw)
                losses.append(loss / (len(ctx) * X.size))
        for loss in losses:
            loss.backward()
        trainer.allreduce_grads()
        gluonnlp.utils.clip_grad_global_norm(params, 0.25)
        trainer.update(1)
        yield losses, params


def _detached(states):
    if isinstance(states, (list, tuple)):
        return [_detached(state) for state in states]
    return states.detach()
