# SPDX-License-Identifier: Apache-2.0
"""Word problems about counting, comparing, sharing, packing, fractions and ages."""

from __future__ import annotations

from specla.train.sketch import Draw, Sketch, Template


def gains_and_losses(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    a, b, c = d.n(20, 200), d.n(3, 90), d.n(2, 19)
    q = d.pick(
        f"{p.name} owned {a} {x}, received {b} more as a present and then lost {c}. How many {x} "
        f"does {p.they} own now?",
        f"There were {a} {x} in {p.name}'s drawer. {p.They} put in {b} more, but {c} broke. How "
        f"many whole {x} are there?",
    )
    steps = [
        f"With the new ones there were {d.eq(f'{a} + {b}')} {x}.",
        f"Then {d.eq(f'{a + b} - {c}')} {x} were left.",
    ]
    return Sketch(q, steps, a + b - c)


def times_and_more(d: Draw) -> Sketch:
    p, r, x = d.person(), d.person(), d.thing()
    a, k, m = d.n(3, 60), d.n(2, 6), d.n(2, 30)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times", 6: "six times"}[k]
    q = d.pick(
        f"{p.name} has {a} {x}. {r.name} has {m} more than {word} as many. How many {x} does "
        f"{r.name} have?",
        f"The number of {x} that {r.name} collected is {m} above {word} the number that {p.name} "
        f"collected, which is {a}. How many did {r.name} collect?",
    )
    steps = [
        f"{word.capitalize()} {p.name}'s number is {d.eq(f'{a} * {k}')}.",
        f"{r.name} has {d.eq(f'{a * k} + {m}')} {x}.",
    ]
    return Sketch(q, steps, a * k + m)


def three_friends(d: Draw) -> Sketch:
    p, r, s, x = d.person(), d.person(), d.person(), d.thing()
    a, k, m = d.n(4, 50), d.n(2, 5), d.n(1, 15)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k]
    q = d.pick(
        f"{p.name} found {a} {x}, {r.name} found {word} that number, and {s.name} found {m} more "
        f"than {r.name}. How many {x} did the three find together?",
        f"{r.name} has {word} as many {x} as {p.name}, while {s.name} has {m} more {x} than "
        f"{r.name}. {p.name} has {a}. What is their combined number of {x}?",
    )
    steps = [
        f"{r.name} has {d.eq(f'{a} * {k}')} {x}.",
        f"{s.name} has {d.eq(f'{a * k} + {m}')} {x}.",
        f"Together they have {d.eq(f'{a} + {a * k} + {a * k + m}')} {x}.",
    ]
    return Sketch(q, steps, a + 2 * a * k + m)


def equal_shares(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    people, each, kept = d.n(3, 12), d.n(2, 15), d.n(1, 20)
    total = people * each + kept
    q = d.pick(
        f"{p.name} has {total} {x}. {p.They} keeps {kept} and divides the others equally among "
        f"{people} children. How many {x} does each child get?",
        f"From a pile of {total} {x}, {p.name} sets {kept} aside. The rest go in equal parts to "
        f"{people} classmates. What does one classmate receive?",
    )
    steps = [
        f"There are {d.eq(f'{total} - {kept}')} {x} to share.",
        f"Each one gets {d.eq(f'{total - kept} / {people}')} {x}.",
    ]
    return Sketch(q, steps, each)


def boxes_on_shelves(d: Draw) -> Sketch:
    x, place = (
        d.thing(),
        d.pick("warehouse", "cellar", "school", "shop", "garage", "museum", "library"),
    )
    a, b, c, gone = d.n(2, 12), d.n(2, 15), d.n(2, 15), d.n(1, 30)
    total = a * b * c
    gone = min(gone, total - 1)
    q = d.pick(
        f"A {place} has {a} shelves with {b} boxes on each, and every box holds {c} {x}. After "
        f"{gone} {x} are taken away, how many remain?",
        f"In a {place}, {c} {x} fit in one box. There are {a} shelves of {b} boxes, all full. "
        f"Someone removes {gone} {x}. How many {x} are still in the {place}?",
    )
    steps = [
        f"There are {d.eq(f'{a} * {b}')} boxes.",
        f"They hold {d.eq(f'{a * b} * {c}')} {x}.",
        f"Then {d.eq(f'{total} - {gone}')} {x} remain.",
    ]
    return Sketch(q, steps, total - gone)


def rows_of_seats(d: Draw) -> Sketch:
    hall = d.pick(
        "theater", "concert hall", "cinema", "stadium block", "lecture room", "circus tent"
    )
    rows, seats = d.n(5, 40), d.n(6, 30)
    sold = d.n(10, rows * seats - 1)
    q = d.pick(
        f"A {hall} has {rows} rows of {seats} seats. If {sold} seats are taken, how many are "
        f"free?",
        f"The {hall} is arranged in {rows} rows with {seats} seats in each row. {sold} tickets "
        f"were sold. How many seats stay empty?",
    )
    steps = [
        f"There are {d.eq(f'{rows} * {seats}')} seats.",
        f"The number of free seats is {d.eq(f'{rows * seats} - {sold}')}.",
    ]
    return Sketch(q, steps, rows * seats - sold)


def fraction_left(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    k, part = d.pick(2, 3, 4, 5, 6, 8, 10), d.n(3, 40)
    total, more = k * part, d.n(1, part)
    word = {
        2: "half",
        3: "a third",
        4: "a quarter",
        5: "a fifth",
        6: "a sixth",
        8: "an eighth",
    }.get(k, "a tenth")
    q = d.pick(
        f"{p.name} baked {total} rolls. {word.capitalize()} of them were eaten at breakfast and "
        f"{more} more at lunch. How many rolls were left?",
        f"Of {total} {x}, {p.name} sold {word} in the morning and {more} in the afternoon. How "
        f"many {x} are unsold?",
    )
    steps = [
        f"{word.capitalize()} of {total} is {d.eq(f'{total} / {k}')}.",
        f"After that {d.eq(f'{total} - {part}')} were left.",
        f"In the end {d.eq(f'{total - part} - {more}')} were left.",
    ]
    return Sketch(q, steps, total - part - more)


def share_of_group(d: Draw) -> Sketch:
    percent, hundred = d.n(10, 90, 10), d.n(2, 60)
    total, minus = hundred * 10, d.n(1, 5)
    count = total * percent // 100
    minus = min(minus, count)
    group, does = d.pick(
        ("pupils", "come by bus"), ("guests", "order soup"), ("workers", "wear glasses"),
        ("visitors", "buy a map"), ("runners", "finish the race"), ("members", "play tennis"),
    )  # fmt: skip
    q = d.pick(
        f"Out of {total} {group}, {percent}% {does}. How many {group} do not {does}?",
        f"There are {total} {group}. If {percent}% of them {does}, how many do not?",
    )
    steps = [
        f"The number who {does} is {d.eq(f'{total} * {percent} / 100')}.",
        f"So {d.eq(f'{total} - {count}')} do not.",
    ]
    return Sketch(q, steps, total - count)


def ages(d: Draw) -> Sketch:
    p, r = d.person(), d.person()
    a, k, years = d.n(3, 20), d.n(2, 5), d.n(2, 15)
    word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[k]
    q = d.pick(
        f"{p.name} is {a}. {r.name} is {word} as old. When {years} years have passed, what do "
        f"their ages add up to?",
        f"Today {r.name} is {word} the age of {p.name}, who is {a} years old. How old will both "
        f"be together {years} years from now?",
    )
    steps = [
        f"{r.name} is {d.eq(f'{a} * {k}')} years old.",
        f"In {years} years {p.name} will be {d.eq(f'{a} + {years}')}.",
        f"{r.name} will be {d.eq(f'{a * k} + {years}')}.",
        f"The sum is {d.eq(f'{a + years} + {a * k + years}')}.",
    ]
    return Sketch(q, steps, a + a * k + 2 * years)


def age_difference(d: Draw) -> Sketch:
    p, r = d.person(), d.person()
    a, older, ago = d.n(12, 40), d.n(2, 25), d.n(2, 11)
    kin = d.pick("aunt", "uncle", "cousin", "neighbor", "teacher", "coach", "boss")
    q = d.pick(
        f"{p.name} is {a} years old and {p.their} {kin} {r.name} is {older} years older. How old "
        f"was {r.name} {ago} years ago?",
        f"{r.name} is {older} years older than {p.name}, who turned {a} today. What was "
        f"{r.name}'s age {ago} years earlier?",
    )
    steps = [
        f"{r.name} is {d.eq(f'{a} + {older}')} now.",
        f"{ago} years ago {r.name} was {d.eq(f'{a + older} - {ago}')}.",
    ]
    return Sketch(q, steps, a + older - ago)


def packs_needed(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    guests, each, pack = d.n(4, 30), d.n(1, 6), d.n(2, 12)
    need = guests * each
    packs = -(-need // pack)
    spare = packs * pack - need
    q = (
        f"{p.name} wants to give {each} {x} to each of {guests} guests. They come in packs of "
        f"{pack}. If {p.they} buys {packs} packs, how many {x} are left over?"
    )
    steps = [
        f"The guests get {d.eq(f'{guests} * {each}')} {x}.",
        f"The packs contain {d.eq(f'{packs} * {pack}')} {x}.",
        f"So {d.eq(f'{packs * pack} - {need}')} are left over.",
    ]
    return Sketch(q, steps, spare)


def garden_rows(d: Draw) -> Sketch:
    p = d.person()
    a, b = d.pick(
        ("carrots", "onions"), ("tulips", "roses"), ("beans", "peas"), ("leeks", "beets")
    )
    r1, c1, r2, c2, dead = d.n(2, 15), d.n(3, 20), d.n(2, 15), d.n(3, 20), d.n(1, 6)
    total = r1 * c1 + r2 * c2
    q = d.pick(
        f"{p.name} planted {r1} rows of {c1} {a} and {r2} rows of {c2} {b}. Frost killed {dead} "
        f"plants. How many plants survived?",
        f"A garden holds {r1} rows with {c1} {a} each and {r2} rows with {c2} {b} each. Rabbits "
        f"eat {dead} of the plants. How many plants does {p.name} still have?",
    )
    steps = [
        f"There were {d.eq(f'{r1} * {c1}')} {a}.",
        f"There were {d.eq(f'{r2} * {c2}')} {b}.",
        f"Altogether there were {d.eq(f'{r1 * c1} + {r2 * c2}')} plants.",
        f"Then {d.eq(f'{total} - {dead}')} survived.",
    ]
    return Sketch(q, steps, total - dead)


def animals_legs(d: Draw) -> Sketch:
    p = d.person()
    a, b = d.n(2, 40), d.n(2, 40)
    four, two = (
        d.pick("cows", "goats", "sheep", "pigs", "donkeys"),
        d.pick("hens", "ducks", "geese"),
    )
    q = d.pick(
        f"{p.name}'s farm has {a} {four} and {b} {two}. How many legs do these animals have "
        f"together?",
        f"In a meadow {p.name} counts {a} {four} and {b} {two}. What number of legs is that?",
    )
    steps = [
        f"The {four} have {d.eq(f'{a} * 4')} legs.",
        f"The {two} have {d.eq(f'{b} * 2')} legs.",
        f"Together they have {d.eq(f'{4 * a} + {2 * b}')} legs.",
    ]
    return Sketch(q, steps, 4 * a + 2 * b)


def recipe_scaling(d: Draw) -> Sketch:
    p = d.person()
    serves, factor, amount = d.n(2, 8), d.n(2, 9), d.n(2, 30)
    what = d.pick(
        "grams of salt", "cups of flour", "eggs", "spoons of sugar", "ml of milk", "potatoes"
    )
    q = d.pick(
        f"A recipe for {serves} people needs {amount} {what}. How many {what} does {p.name} need "
        f"to cook for {serves * factor} people?",
        f"{p.name} cooks for {serves * factor} people with a recipe meant for {serves}. The "
        f"recipe says {amount} {what}. What amount should {p.they} use?",
    )
    steps = [
        f"The recipe must be made {d.eq(f'{serves * factor} / {serves}')} times.",
        f"That needs {d.eq(f'{amount} * {factor}')} {what}.",
    ]
    return Sketch(q, steps, amount * factor)


def average_score(d: Draw) -> Sketch:
    p = d.person()
    count = d.n(3, 5)
    mean = d.n(10, 95)
    shifts = [d.n(-8, 8) for _ in range(count - 1)]
    scores = [mean + s for s in shifts]
    scores.append(mean * count - sum(scores))
    listed = ", ".join(map(str, scores[:-1])) + f" and {scores[-1]}"
    what = d.pick("points in games", "marks in tests", "goals in seasons", "pages on days")
    q = (
        f"{p.name} got {listed} {what.split()[0]} in {count} {what.split()[-1]}. What is the "
        f"average per {what.split()[-1][:-1]}?"
    )
    steps = [
        f"The sum is {d.eq(' + '.join(map(str, scores)))}.",
        f"The average is {d.eq(f'{sum(scores)} / {count}')}.",
    ]
    return Sketch(q, steps, mean)


def missing_part(d: Draw) -> Sketch:
    p = d.person()
    a, k, c = d.n(5, 60), d.n(2, 5), d.n(5, 80)
    box = d.pick("jar", "basket", "box", "bag", "crate")
    one, two, three = d.pick(("red", "blue", "green"), ("small", "large", "medium"))
    x = d.pick("beads", "balls", "bricks", "tiles", "buttons", "blocks")
    total = a + a * k + c
    q = (
        f"A {box} of {p.name}'s contains {total} {x}: {a} {one} ones, {k} times as many {two} "
        f"ones, and the others are {three}. "
        + d.pick(f"How many are {three}?", f"What is the number of {three} {x}?")
    )
    steps = [
        f"There are {d.eq(f'{a} * {k}')} {two} {x}.",
        f"The {one} and {two} ones make {d.eq(f'{a} + {a * k}')}.",
        f"So {d.eq(f'{total} - {a + a * k}')} are {three}.",
    ]
    return Sketch(q, steps, c)


def doubling_days(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    first, days = d.n(2, 30), d.n(3, 5)
    counts = [first * 2**i for i in range(days)]
    q = d.pick(
        f"{p.name} made {first} {x} on day 1 and doubled the number every day. How many {x} did "
        f"{p.they} make in {days} days altogether?",
        f"On the first day {p.name} sold {first} {x}, and each later day twice as many as the day "
        f"before. How many were sold over {days} days?",
    )
    steps = [f"Day {i + 2}: {d.eq(f'{c} * 2')}." for i, c in enumerate(counts[:-1])]
    steps.append(f"The total is {d.eq(' + '.join(map(str, counts)))}.")
    return Sketch(q, steps, sum(counts))


TEMPLATES: tuple[Template, ...] = (
    gains_and_losses,
    times_and_more,
    three_friends,
    equal_shares,
    boxes_on_shelves,
    rows_of_seats,
    fraction_left,
    share_of_group,
    ages,
    age_difference,
    packs_needed,
    garden_rows,
    animals_legs,
    recipe_scaling,
    average_score,
    missing_part,
    doubling_days,
)
