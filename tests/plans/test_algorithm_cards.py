"""docs/algorithms.md: every algorithm has a card, whose numbers and pictures are the plan's."""

from __future__ import annotations

from collections import Counter

import pytest

from gluonpar.collectives import ALGORITHMS
from gluonpar.plans import plan
from tests.support.cards import CARDS, TEXT, formula, rows

PLANS = [name for name, plan in ALGORITHMS.items() if plan]
LABELS = (
    "steps",
    "sent per device (maximum)",
    "critical path",
    "extra memory per device (maximum)",
)


def counted(name, k):
    """The plan's counts in the order of LABELS, amounts of data in arrays."""
    hops = ALGORITHMS[name](k)
    chunks, steps = plan.num_chunks(hops), plan.num_steps(hops)
    carried = [Counter((h.src, h.dst) for h in hops if h.step == s) for s in range(steps)]
    kept = Counter(h.dst for h in hops if h.reduce or chunks > 1)  # see executor.run
    most = (max(c.values(), default=0) for c in (plan.chunks_sent(hops), kept))
    sent, memory = (number / chunks for number in most)
    return steps, sent, sum(max(step.values()) for step in carried) / chunks, memory


def test_the_cards_are_in_the_order_of_the_registry():
    assert list(CARDS) == list(ALGORITHMS)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("k", range(1, 10))
def test_the_formulas_give_the_counts_of_the_plan(name, k):
    assert [formula(name, label, k) for label in LABELS] == pytest.approx(counted(name, k))


def test_the_comparison_for_eight_devices_has_a_row_with_the_counts_of_every_plan():
    table = rows(TEXT.partition("For K = 8")[2].partition("**Sent**")[0])
    assert [name for name in table if name in ALGORITHMS] == PLANS
    for name in PLANS:
        assert [float(cell) for cell in table[name]] == pytest.approx(counted(name, 8))


@pytest.mark.parametrize("name", PLANS)
def test_the_order_of_additions_is_the_plans(name):
    hops = ALGORITHMS[name](4)
    values = [[str(i)] * plan.num_chunks(hops) for i in range(4)]
    for step in plan.by_step(hops):
        sent = [values[hop.src][hop.chunk] for hop in step]
        for hop, came in zip(step, sent):
            own = values[hop.dst][hop.chunk]
            values[hop.dst][hop.chunk] = f"({own}+{came})" if hop.reduce else came
    assert f"({rows(CARDS[name])['order of additions'][0]})".replace("`", "") == values[0][0]
