"""trace: the printed table is the plan."""

from __future__ import annotations

import re

import pytest

from gluonpar.collectives import ALGORITHMS, trace
from gluonpar.plans import plan

PLANS = [name for name, algorithm in ALGORITHMS.items() if algorithm.plan is not None]
HOP = re.compile(r"(\d+) -> (\d+): chunks? ([\d, ]+) \((add|copy)\)")


def hop(step, src, dst, chunk, kind):
    return plan.Hop(int(step), int(src), int(dst), int(chunk), kind == "add")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_the_table_is_the_plan(name, k):
    title, *rows, total = str(trace(name, k)).split("\n")
    hops = ALGORITHMS[name].plan(k)
    read = [
        hop(int(row.split()[1]) - 1, src, dst, chunk, kind)
        for row in rows
        for src, dst, chunks, kind in HOP.findall(row)
        for chunk in chunks.split(", ")
    ]
    assert sorted(read) == sorted(hops)
    assert len(rows) == plan.num_steps(hops)
    assert title == f"{name}, {k} device{'s' * (k > 1)}"
    steps, messages, *sent = re.findall(r"[\d/]+", total)
    assert (int(steps), int(messages)) == (len(rows), len(hops))
    counts, chunks = plan.chunks_sent(hops), plan.num_chunks(hops)
    assert [eval(fraction) for fraction in sent] == [counts[i] / chunks for i in range(k)]
