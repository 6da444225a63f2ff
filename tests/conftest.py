import gluonpar  # noqa: F401 - before mxnet, in whatever order the test modules are imported
