"""MXNet's private parts: the engine, arrays, the tape and fields of Python objects, GPUs.

No other package uses MXNet 1.9.1's private interfaces.

- Engine: ``engine`` runs Python functions as operators, ``interrupts`` keeps signal handlers out of
  them, ``threads`` shares out the processors, ``heap`` keeps memory and gives each thread more
  workspaces, ``device_threads`` has a Python thread per context.
- Arrays: ``memory`` reads and writes arrays in place, ``cached_op`` traces functions of arrays,
  ``used_numbers`` notes the numbers that operators are given.
- Tape: ``tape`` tells which recording a backward pass is of, and what it writes.
  ``private_fields`` has the private fields and functions of Gluon's and the optimizers' objects.
- GPUs: ``devices`` chooses contexts, ``nccl`` sums arrays on several GPUs.
"""
