"""For programs of Gluon: the Trainer, kvstore='gluonpar', SyncBatchNorm, make_parallel, towers."""
