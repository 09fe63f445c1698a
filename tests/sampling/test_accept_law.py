# SPDX-License-Identifier: Apache-2.0
"""The law of the output, by exact enumeration in fractions. Tier: law.

The walk's chooser is injected, so every outcome of every draw can be followed with its exact
probability. Whatever the trees, the law of the emitted text must equal the target's own; six
rules that engines have shipped are enumerated too and must come out biased by the known amounts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction as F

import pytest

from specla.request import SamplingParams
from specla.sampling.accept import RowLaw, Walk
from specla.topology.tree import DraftTree

Law = tuple[F, ...]
Prefix = tuple[int, ...]

# The vectors of the reference table: target p and draft q over four tokens.
P: Law = (F(40, 100), F(30, 100), F(20, 100), F(10, 100))
Q: Law = (F(50, 100), F(10, 100), F(35, 100), F(5, 100))


def target(prefix: Prefix) -> Law:
    """A law that depends on the whole prefix; P at the start."""
    turn = sum((i + 1) * (t + 1) for i, t in enumerate(prefix))
    masses = [P[(i + turn) % 4] * (1 + (turn * (i + 1)) % 3) for i in range(4)]
    return tuple(mass / sum(masses) for mass in masses)


def row(prefix: Prefix, remaining: int, ends: Sequence[int] = ()) -> RowLaw:
    return RowLaw(
        params=SamplingParams(),
        seed=0,
        history=(0, *prefix),
        num_prompt_tokens=1,
        end_token_ids=frozenset(ends),
        remaining=remaining,
    )


def outcomes(tree: DraftTree, prefix: Prefix, remaining: int, ends=()) -> Iterator[tuple[F, Walk]]:
    """Every way the walk can go, with its probability under the target."""

    def follow(script: Prefix, weight: F) -> Iterator[tuple[F, Walk]]:
        one = Walk(tree, row(prefix, remaining, ends))
        for token in script:
            one.advance(token)
        if one.done:
            yield weight, one
            return
        for token, p in enumerate(target((*prefix, *script))):
            if p:
                yield from follow((*script, token), weight * p)

    return follow((), F(1))


Proposals = Callable[[Prefix], Iterator[tuple[F, DraftTree]]]


def output_law(propose: Proposals, length: int, ends: Sequence[int] = ()) -> dict[Prefix, F]:
    """Law of the whole output of speculative decoding: rounds until the end."""
    law: dict[Prefix, F] = defaultdict(F)
    open_texts: dict[Prefix, F] = {(): F(1)}
    while open_texts:
        prefix, mass = open_texts.popitem()
        for chance, tree in propose(prefix):
            for weight, one in outcomes(tree, prefix, length - len(prefix), ends):
                text = (*prefix, *one.emitted)
                if one.finish is None:
                    open_texts[text] = open_texts.get(text, F(0)) + mass * chance * weight
                else:
                    law[text] += mass * chance * weight
    return dict(law)


def ar_law(length: int, ends: Sequence[int] = ()) -> dict[Prefix, F]:
    """The same by the definition: one token after another."""
    law: dict[Prefix, F] = {}
    texts: list[tuple[Prefix, F]] = [((), F(1))]
    while texts:
        prefix, mass = texts.pop()
        if len(prefix) == length or (prefix and prefix[-1] in ends):
            law[prefix] = mass
            continue
        texts += [((*prefix, t), mass * p) for t, p in enumerate(target(prefix)) if p]
    return law


def _ranked(q: Law) -> list[int]:
    return sorted(range(len(q)), key=lambda t: -q[t])


def _bush(width: int, depth: int) -> list[Prefix]:
    return list(itertools.product(_ranked(Q)[:width], repeat=depth))


def always(*paths: Sequence[int]) -> Proposals:
    return lambda prefix: iter([(F(1), DraftTree.from_paths(0, paths))])


def sampled_chains(prefix: Prefix) -> Iterator[tuple[F, DraftTree]]:
    """A chain of two drawn from q."""
    for path in itertools.product(range(4), repeat=2):
        yield Q[path[0]] * Q[path[1]], DraftTree.from_paths(0, [path])


def sampled_then_pruned(prefix: Prefix) -> Iterator[tuple[F, DraftTree]]:
    """Sampled children dropped by their own score: poison for p/q rules, harmless here."""
    for path in itertools.product(range(4), repeat=2):
        left = list(itertools.takewhile(lambda t: Q[t] >= F(1, 5), path))
        yield Q[path[0]] * Q[path[1]], DraftTree.from_paths(0, [left])


def sampled_then_deduplicated(prefix: Prefix) -> Iterator[tuple[F, DraftTree]]:
    """Two i.i.d. children, merged where equal."""
    for pair in itertools.product(range(4), repeat=2):
        yield Q[pair[0]] * Q[pair[1]], DraftTree.from_paths(0, [[t] for t in pair])


def adaptive(prefix: Prefix) -> Iterator[tuple[F, DraftTree]]:
    """Depends on the text so far, down to offering nothing."""
    paths = [[], [[1, 2, 3]], [[0], [2]], _bush(2, 2)][sum(prefix) % 4]
    yield F(1), DraftTree.from_paths(0, paths)


PROPOSALS = {
    "nothing": always(),
    "top-1": always([0]),
    "top-2": always([0], [2]),
    "top-3": always([0], [2], [1]),
    "all children": always([0], [1], [2], [3]),
    "chain longer than the text": always([0, 2, 0, 2, 0, 2]),
    "bush": always(*_bush(2, 3)),
    "lopsided": always([3, 3], [0, 1, 2], [0, 2]),
    "sampled": sampled_chains,
    "sampled, pruned": sampled_then_pruned,
    "sampled, merged": sampled_then_deduplicated,
    "adaptive": adaptive,
}


@pytest.mark.parametrize("ends", [(), (1,), (0, 3)], ids=["no end", "end 1", "ends 0 3"])
@pytest.mark.parametrize("name", PROPOSALS)
def test_output_law_is_the_targets(name, ends):
    law = output_law(PROPOSALS[name], 3, ends)
    assert sum(law.values()) == 1
    assert law == ar_law(3, ends)


def test_acceptance_is_the_childrens_mass():
    tree = DraftTree.from_paths(0, [[0], [2]])
    p = target(())
    accepted = sum(weight for weight, one in outcomes(tree, (), 9) if len(one.path) > 1)
    assert p == P
    assert accepted == F(6, 10)


# Below: rules with p and q, over one position, as the reference table enumerates them.


def _normal(masses: Sequence[F]) -> list[F]:
    return [mass / sum(masses) for mass in masses]


def _without(q: Sequence[F], token: int) -> list[F]:
    return _normal([F(0) if t == token else mass for t, mass in enumerate(q)])


def _fixed(q: Sequence[F], token: int) -> list[F]:
    return list(q)


def _reject_in_turn(children, q, update) -> tuple[list[F], F]:
    """Judge children one after another by min(1, p/q), with residuals; output law, acceptance."""
    out, p, alive = [F(0)] * 4, list(P), F(1)
    for token in children:
        rate = F(1) if q[token] == 0 or p[token] >= q[token] else p[token] / q[token]
        out[token] += alive * rate
        alive *= 1 - rate
        if alive == 0:
            return out, F(1)
        rest = [max(F(0), a - b) for a, b in zip(p, q, strict=True)]
        p = _normal(rest) if sum(rest) else p
        q = update(q, token)
    return [o + alive * mass for o, mass in zip(out, p, strict=True)], 1 - alive


def _independent(count: int) -> Iterator[tuple[F, list[int]]]:
    for children in itertools.product(range(4), repeat=count):
        weight = F(1)
        for token in children:
            weight *= Q[token]
        yield weight, list(children)


def _without_replacement(count: int) -> Iterator[tuple[F, list[int]]]:
    for children in itertools.permutations(range(4), count):
        weight, q = F(1), list(Q)
        for token in children:
            weight *= q[token]
            q = _without(q, token)
        yield weight, list(children)


def _sharpened() -> Iterator[tuple[F, list[int]]]:
    for token, mass in enumerate(_normal([mass * mass for mass in Q])):
        yield mass, [token]


def _by_score(children: list[int]) -> list[int]:
    return sorted(children, key=lambda t: -Q[t])


def _map(children: Iterator[tuple[F, list[int]]], change) -> Iterator[tuple[F, list[int]]]:
    return ((weight, change(c)) for weight, c in children)


def _enumerate(children, update=_fixed) -> tuple[list[float], float, bool]:
    law, accepted = [F(0)] * 4, F(0)
    for weight, offered in children:
        out, rate = _reject_in_turn(offered, list(Q), update)
        law = [a + weight * b for a, b in zip(law, out, strict=True)]
        accepted += weight * rate
    return [round(float(x), 4) for x in law], round(float(accepted), 4), tuple(law) == P


LOSSLESS = {
    "chain, min(1, p/q)": (lambda: _enumerate(_independent(1)), 0.75),
    "two i.i.d.": (lambda: _enumerate(_independent(2)), 0.7875),
    "two without replacement": (lambda: _enumerate(_without_replacement(2), _without), 0.8146),
    "three without replacement": (lambda: _enumerate(_without_replacement(3), _without), 0.9667),
}

BIASED = {
    "without replacement, q not updated": (
        lambda: _enumerate(_without_replacement(2)),
        ([0.4, 0.2957, 0.2, 0.1043], 0.8146),
    ),
    "i.i.d., duplicates dropped": (
        lambda: _enumerate(_map(_independent(2), lambda c: list(dict.fromkeys(c)))),
        ([0.4, 0.2976, 0.2, 0.1024], 0.7875),
    ),
    "i.i.d., sorted by q": (
        lambda: _enumerate(_map(_independent(2), _by_score)),
        ([0.6, 0.2121, 0.13, 0.0579], 0.8275),
    ),
    "argmax draft judged with q": (
        lambda: _enumerate(iter([(F(1), [0])])),
        ([0.8, 0.16, 0.0, 0.04], 0.8),
    ),
    "sampled child pruned by q": (
        lambda: _enumerate(_map(_independent(1), lambda c: [t for t in c if Q[t] >= F(1, 5)])),
        ([0.46, 0.245, 0.23, 0.065], 0.6),
    ),
    "sharper draft judged with q": (
        lambda: _enumerate(_sharpened()),
        ([0.5195, 0.239, 0.1818, 0.0597], 0.7338),
    ),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_rejection_rules_done_right_are_lossless(name):
    rule, acceptance = LOSSLESS[name]
    assert rule() == ([0.4, 0.3, 0.2, 0.1], acceptance, True)


@pytest.mark.parametrize("name", BIASED)
def test_known_bad_rules_are_seen_to_be_biased(name):
    rule, (law, acceptance) = BIASED[name]
    assert rule() == (law, acceptance, False)


class Stubborn(Walk):
    """A broken walk: an only child is accepted whatever the target drew."""

    def advance(self, token: int) -> None:
        children = self.tree.children()[self.path[-1]]
        super().advance(self.tree.tokens[children[0]] if len(children) == 1 else token)


def test_the_enumeration_notices_a_broken_walk(monkeypatch):
    monkeypatch.setitem(globals(), "Walk", Stubborn)
    assert output_law(PROPOSALS["sampled"], 3) != ar_law(3)
    assert output_law(PROPOSALS["nothing"], 3) == ar_law(3)
