# SPDX-License-Identifier: Apache-2.0
"""The budget in a world whose acceptance and costs are known: never much slower than plain
decoding, and nearly as fast as the best fixed policy."""

from __future__ import annotations

from statistics import mean

import pytest
from budget_world import Played, Stairs, play

from specla.drafters.base import DraftRow, Observation
from specla.drafters.budget import (
    ALLOWANCE,
    MOST_CREDIT,
    START_CREDIT,
    Account,
    Budget,
    Decision,
)
from specla.topology.tree import DraftTree

MAX_NODES = 16
LIGHT = Stairs(fixed=900, each=10, draft=50)
DEAR = Stairs(fixed=100, each=60, draft=30)
RAGGED = Stairs(fixed=16, each=1, draft=1, padded=False)
# By rows: rounds, and nodes of a tree.
SIZES = {1: (800, 16), 8: (150, 16), 64: (60, 8)}


def ideal(costs: Stairs, rows: int, p: float, nodes: int) -> float:
    """Speed of always drafting chains of `nodes` - 1, over plain decoding."""
    tokens = sum(p**i for i in range(nodes))
    us = costs.round_us(rows, nodes) + ((costs.draft or 0.0) if nodes > 1 else 0.0)
    return tokens * costs.round_us(rows, 1) / us


def compare(costs: Stairs, rows: int, p: float, seeds: int = 1) -> None:
    """Never slower than that, and close to the best on average: early luck decides how soon."""
    rounds, most = SIZES[rows]
    speeds = list[float]()
    for seed in range(seeds):
        budget = Budget("x", most, costs)
        played = play(
            budget, costs, lambda i, d: p, rows=rows, rounds=rounds, max_nodes=most, seed=seed
        )
        speeds.append(played.speed)
    assert min(speeds) >= 0.97
    assert mean(speeds) >= 0.95 * max(ideal(costs, rows, p, n) for n in range(1, most + 1))


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_close_to_the_best_fixed_policy(p: float, rows: int) -> None:
    """... and so never slower than 0.97 of plain decoding, looks and learning included."""
    compare(LIGHT, rows, p)


@pytest.mark.parametrize("costs", [DEAR, RAGGED], ids=["dear", "ragged"])
@pytest.mark.parametrize(("rows", "p"), [(1, 0.0), (1, 0.6), (8, 0.5), (8, 0.9), (64, 0.8)])
def test_in_other_worlds_too(costs: Stairs, rows: int, p: float) -> None:
    compare(costs, rows, p, seeds=3)


def test_acceptance_that_falls_with_depth() -> None:
    """Good guesses for two tokens and none after: two drafts, not fifteen."""
    costs = Stairs(fixed=100, each=10, draft=5)
    law = {1: 0.9, 2: 0.8}
    played = play(Budget("x", MAX_NODES, costs), costs, lambda i, d: law.get(d, 0.05), rows=1,
                  rounds=600)  # fmt: skip
    late = played.nodes[200:]
    assert sum(nodes in (2, 3, 4) for nodes in late) > 0.9 * len(late)


def test_it_does_not_flap_at_the_break_even() -> None:
    """Where drafting is worth what it costs, give or take nothing, it is not switched at every
    round."""
    for p in (0.45, 0.5, 0.55, 0.6):
        budget = Budget("x", MAX_NODES, DEAR)
        play(budget, DEAR, lambda i, d, p=p: p, rows=1, rounds=1000)
        assert budget.account.switches <= 15


def test_a_sudden_change_for_the_worse() -> None:
    before = play(Budget("x", MAX_NODES, LIGHT), LIGHT, lambda i, d: 0.9, rows=1, rounds=300)
    budget = Budget("x", MAX_NODES, LIGHT)
    both = play(budget, LIGHT, lambda i, d: 0.9 * (i < 300), rows=1, rounds=1300)
    steps, tokens = both.steps - before.steps, both.tokens - before.tokens
    assert both.nodes[:300] == before.nodes
    assert tokens >= 0.97 * steps
    assert all(nodes <= 2 for nodes in both.nodes[450:])


def test_a_sudden_change_for_the_better() -> None:
    budget = Budget("x", MAX_NODES, LIGHT)
    play(budget, LIGHT, lambda i, d: 0.0, rows=1, rounds=500)
    assert not budget.account.on
    after = play(budget, LIGHT, lambda i, d: 0.9, rows=1, rounds=500, seed=1)
    assert budget.account.on
    assert after.speed > 0.8 * ideal(LIGHT, 1, 0.9, MAX_NODES)


def test_an_estimate_that_is_wrong_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """However wrong the estimates are, the accounts bound what is lost."""
    budget = Budget("x", MAX_NODES, LIGHT)
    monkeypatch.setattr(
        budget.survival, "path", lambda tree, slot: [0.9**depth for depth in tree.depths()]
    )
    played = play(budget, LIGHT, lambda i, d: 0.0, rows=4, rounds=800)
    worst = 2.0  # the step that empties the account may cost that much beyond it
    assert played.steps - played.tokens <= START_CREDIT + ALLOWANCE * 800 + worst
    assert budget.account.switches > 2


# ---- prompts, one after another

TEXT = 50  # rounds
# A call costs a quarter of a step, as an EAGLE drafter's does on a CPU.
CALLS = Stairs(fixed=22, each=1, draft=5, padded=False)


def text(budget: Budget, p: float, seed: int = 0, rows: int = 1) -> Played:
    """The next prompt's answer. The drafter is surer where it is better, but too sure."""
    return play(
        budget, CALLS, lambda i, d: p, rows=rows, rounds=TEXT, seed=seed,
        confidence=0.95 if p > 0.5 else 0.6,
    )  # fmt: skip


def best_speed(p: float) -> float:
    return max(ideal(CALLS, 1, p, n) for n in range(1, MAX_NODES + 1))


@pytest.mark.parametrize("rows", [1, 8])
def test_a_first_text_that_does_not_pay_loses_little(rows: int) -> None:
    """No more than the credit and what was earned, less half a look."""
    for seed in range(4):
        played = text(Budget("x", MAX_NODES, CALLS), 0.0, seed, rows)
        assert played.steps - played.tokens <= START_CREDIT + ALLOWANCE * TEXT


def test_a_first_text_that_pays_is_drafted_for_at_once() -> None:
    speeds = [text(Budget("x", MAX_NODES, CALLS), 0.9, seed).speed for seed in range(4)]
    assert mean(speeds) >= 0.88 * best_speed(0.9)


def test_texts_that_pay_and_that_do_not_in_turns() -> None:
    """What a good text gains pays for looks at the next one, not for half of a bad one."""
    budget, good, bad = Budget("x", MAX_NODES, CALLS), list[Played](), list[Played]()
    for i in range(20):
        good.append(text(budget, 0.9, seed=i))
        bad.append(text(budget, 0.0, seed=i))
    assert sum(t.tokens for t in bad) >= 0.95 * sum(t.steps for t in bad)
    assert sum(t.tokens for t in good) >= 0.85 * best_speed(0.9) * sum(t.steps for t in good)


def test_a_fresh_prompt_is_looked_at() -> None:
    """Whatever became of those before, as soon as a look is earned."""
    budget = Budget("x", MAX_NODES, CALLS)
    for i in range(8):
        text(budget, 0.0, seed=i)
    assert not budget.account.on
    played = text(budget, 0.9, seed=1)
    assert next(i for i, nodes in enumerate(played.nodes) if nodes > 1) <= 20
    assert budget.account.on
    text(budget, 0.0, seed=2)
    assert not budget.account.on
    assert text(budget, 0.9, seed=3).nodes[0] > 1


def test_a_spell_loses_half_and_a_fresh_prompt_one_step() -> None:
    account = Account()
    account.book(100.0)
    assert account.credit == MOST_CREDIT
    account.book(-MOST_CREDIT / 2 + 0.1)
    assert not account.is_lost
    account.stake(1.0)
    account.book(-0.1)
    assert account.is_lost
    account.switch()
    account.look = 2.0
    assert account.may_look
    account.book(-2.0)
    assert account.credit == pytest.approx(MOST_CREDIT / 2 - 2 + ALLOWANCE)
    assert (account.pause(8), account.pause(1000)) == (8, pytest.approx(2 / ALLOWANCE))


def test_one_fresh_row_of_many_changes_little() -> None:
    """It is a small part of what a round costs and of what it brings."""
    budget = Budget("x", MAX_NODES, CALLS)
    play(budget, CALLS, lambda i, d: 0.0, rows=16, rounds=TEXT)
    budget.account.credit = MOST_CREDIT
    # The next look; the pause after it is longer than one round.
    while play(budget, CALLS, lambda i, d: 0.0, rows=16, rounds=1).nodes == [1]:
        pass
    assert not budget.account.on
    old = [row(slot=slot, output=9) for slot in range(2, 17)]
    assert not any(one.max_drafts for one in budget.ask([row(), *old]))
    budget.rested()
    assert all(one.max_drafts for one in budget.ask([row(slot=s) for s in range(1, 17)]))


@pytest.mark.parametrize("is_on", [True, False])
def test_a_fresh_row_counts_once_however_often_a_round_is_asked_about(is_on: bool) -> None:
    """An engine on a GPU asks whether drafting rests, and then for drafts."""
    asked, told = (Budget("x", MAX_NODES, CALLS) for _ in "ab")
    for budget in (asked, told):
        budget.account.on = is_on
        budget._gain, budget._wait, budget._pause = 0.2, 64.0, 64.0
    rows = [row(slot=i, output=i % 2) for i in range(4)]
    for _ in range(2):
        told.rests(4, 2)
    for budget in (asked, told):
        budget.ask(rows)
    assert asked._gain == told._gain == (0.1 if is_on else 0.2)
    assert asked._wait == told._wait == (64 if is_on else 32)
    for budget in (asked, told):
        budget.rested()
        budget.ask(rows)
    assert told._gain == asked._gain == (0.05 if is_on else 0.2)


def test_looking_is_bounded_and_goes_on() -> None:
    budget = Budget("x", MAX_NODES, LIGHT)
    play(budget, LIGHT, lambda i, d: 0.0, rows=1, rounds=100)
    later = play(budget, LIGHT, lambda i, d: 0.0, rows=1, rounds=1500)
    looks = sum(nodes > 1 for nodes in later.nodes)
    assert looks > 50
    assert later.steps - later.tokens <= (ALLOWANCE + 0.001) * 1500


def test_a_drafter_that_costs_many_steps_is_looked_at_too() -> None:
    costs = Stairs(fixed=900, each=10, draft=3000.0)
    budget = Budget("x", MAX_NODES, costs)
    play(budget, costs, lambda i, d: 0.0, rows=1, rounds=200)
    later = play(budget, costs, lambda i, d: 0.0, rows=1, rounds=1500)
    assert sum(nodes > 1 for nodes in later.nodes) > 3
    assert later.steps - later.tokens <= (ALLOWANCE + 0.001) * 1500 + 4
    good = play(budget, costs, lambda i, d: 0.98, rows=1, rounds=3000)
    assert good.tokens / good.steps > 2


def row(max_drafts: int = 15, slot: int = 1, output: int = 0) -> DraftRow:
    return DraftRow(
        slot=slot, tokens=(1,) * (1 + output), num_prompt_tokens=1, max_drafts=max_drafts, seed=0
    )


def test_a_row_is_never_asked_for_more_than_it_can_use() -> None:
    asked = Budget("x", MAX_NODES, LIGHT).ask([row(0), row(2), row(15)])
    assert [one.max_drafts for one in asked] == [0, 2, 15]


def test_fixed_is_so_many_drafts_always() -> None:
    budget = Budget("x", MAX_NODES, DEAR, fixed=3)
    played = play(budget, DEAR, lambda i, d: 0.0, rows=2, rounds=50)
    assert played.nodes == [4] * 50
    assert (budget.account.switches, budget.account.on) == (0, True)


def test_every_decision_says_why() -> None:
    budget = Budget("x", MAX_NODES, DEAR)
    reasons = {}
    for _ in range(400):
        (asked,) = budget.ask([row()])
        drafts = asked.max_drafts
        tree = DraftTree.chain(1, range(2, 2 + drafts))
        call = 30.0 if drafts else None
        (chosen,), decision = budget.choose([1], [tree], draft_us=call)
        assert decision.proposed == (drafts,)
        reasons[decision.reason] = decision.detail
        seen = Observation(slot=1, tree=chosen, path=(0,), emitted=(9,))
        budget.observe([seen], decision.reason)
    assert {"off", "probe"} <= {*reasons} <= {"off", "probe", "pays", "declined"}
    assert reasons["off"].startswith("off: break-even p 0.5")
    (_,), decision = budget.choose([1], [DraftTree.root(1)], draft_us=30.0)
    assert decision.detail == "nothing: no drafts were proposed"


def test_a_first_call_that_compiles_is_not_taken_for_what_calls_cost() -> None:
    """A second where a round takes one thousandth: it would switch off what pays for good."""
    budget = Budget("x", MAX_NODES, Stairs(fixed=900, each=10, draft=None))
    for us in (1e6, *[30.0] * 20):
        (asked,) = budget.ask([row()])
        assert asked.max_drafts > 0
        tree = DraftTree.chain(1, range(2, 2 + asked.max_drafts))
        (chosen,), decision = budget.choose([1], [tree], draft_us=us)
        path = tuple(range(chosen.num_nodes))
        budget.observe(
            [Observation(slot=1, tree=chosen, path=path, emitted=path)], decision.reason
        )
    assert decision.reason == "pays"
    assert (budget.account.on, budget.account.switches) == (True, 0)


def test_the_same_history_gives_the_same_decisions() -> None:
    runs = [
        play(Budget("x", MAX_NODES, LIGHT), LIGHT, lambda i, d: 0.6, rows=3, rounds=100)
        for _ in "ab"
    ]
    assert runs[0] == runs[1]


def test_drafting_that_costs_too_much_is_not_done() -> None:
    """The same drafts pay or do not by the drafter's own cost."""
    speed = {}
    for draft in (10.0, 3000.0):
        costs = Stairs(fixed=900, each=10, draft=draft)
        budget = Budget("x", MAX_NODES, costs)
        speed[draft] = play(budget, costs, lambda i, d: 0.5, rows=1, rounds=600)
    assert speed[10.0].speed > 1.5
    assert speed[3000.0].speed >= 0.97
    assert sum(nodes == 1 for nodes in speed[3000.0].nodes) > 570


@pytest.mark.parametrize("rows", [1, 8])
def test_a_round_in_which_nobody_was_asked_is_what_a_search_would_find(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    trees = [DraftTree.root(5)] * rows
    decided = []
    for searched in (True, False):
        budget = Budget("x", MAX_NODES, LIGHT)
        budget.account.switch()
        if searched:
            # As if drafting were on, but for the reason that is given.
            monkeypatch.setattr(Budget, "_plain", lambda self, rows: _searched(self, trees))
        chosen, decision = budget.choose(range(rows), trees, draft_us=None)
        monkeypatch.undo()
        assert list(chosen) == trees
        decided.append((decision, budget._spent, budget._expected_gain, budget._used[-1]))
    assert decided[0] == decided[1]


def _searched(budget: Budget, trees: list[DraftTree]) -> Decision:
    survival = [budget.survival.path(tree, slot) for slot, tree in enumerate(trees)]
    reason, choice = budget._choice(trees, survival, 0.0, called=False)
    step = LIGHT.round_us(len(trees), 1)
    budget._spent = choice.us / step
    budget._expected_gain = 1 + choice.expected / len(trees) - budget._spent
    budget._used.append(max(len(keep) for keep in choice.keep))
    return Decision(
        reason=reason, detail=budget._why(reason, choice, len(trees)),
        proposed=tuple(tree.num_drafts for tree in trees), expected=(0.0,) * len(trees),
        nodes=choice.nodes, depth=choice.depth,
        speed=(1 + choice.expected / len(trees)) / budget._spent,
    )  # fmt: skip
