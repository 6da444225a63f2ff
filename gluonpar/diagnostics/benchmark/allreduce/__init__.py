"""The all-reduce algorithms measured beside MXNet's own, by the conventions of nccl-tests.

Bytes are those of one device's array. algbw = bytes / time. busbw = algbw * 2(K-1)/K: an all-reduce
over K devices sends at least 2(K-1)/K times the bytes through every device's wires, so an algorithm
that does no more than that has busbw equal to the wires' speed, whatever K is
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).

``candidates`` makes what is measured, ``payload`` tells whether it is right, ``contest`` measures.
"""
