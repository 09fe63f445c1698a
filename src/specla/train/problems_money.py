# SPDX-License-Identifier: Apache-2.0
"""Word problems about prices, wages, savings, discounts and profit."""

from __future__ import annotations

from specla.train.sketch import Draw, Sketch, Template


def two_purchases(d: Draw) -> Sketch:
    p, (x, y) = d.person(), d.two_things()
    a, b, c, e = d.n(2, 12), d.n(2, 15), d.n(2, 12), d.n(2, 15)
    q = d.pick(
        f"{p.name} buys {a} {x} at ${b} apiece and {c} {y} at ${e} apiece. What is the total "
        f"bill?",
        f"At the market, {x} are sold for ${b} each and {y} for ${e} each. {p.name} takes {a} {x} "
        f"and {c} {y}. How much does {p.they} pay in total?",
        f"{p.name} filled {p.their} basket with {a} {x} and {c} {y}. One of the {x} costs ${b} "
        f"and one of the {y} costs ${e}. How many dollars will {p.they} spend?",
    )
    steps = [
        f"The {x} cost {d.eq(f'{a} * {b}', '$')}.",
        f"The {y} cost {d.eq(f'{c} * {e}', '$')}.",
        d.pick("Altogether that is ", "The total is ", f"{p.name} pays ")
        + f"{d.eq(f'{a * b} + {c * e}', '$')}.",
    ]
    return Sketch(q, steps, a * b + c * e)


def change_back(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    a, b = d.n(2, 15), d.n(2, 9)
    paid = (a * b // d.pick(10, 20, 50) + 1) * 50
    q = d.pick(
        f"{p.name} pays for {a} {x} with ${paid}. If each costs ${b}, how much change is due?",
        f"The {x} in a shop are ${b} each. {p.name} wants {a} of them and hands over ${paid}. "
        f"What change should {p.they} get?",
    )
    steps = [
        f"The {x} cost {d.eq(f'{a} * {b}', '$')} in all.",
        f"The change is {d.eq(f'{paid} - {a * b}', '$')}.",
    ]
    return Sketch(q, steps, paid - a * b)


def wages_with_overtime(d: Draw) -> Sketch:
    p = d.person()
    rate, hours, extra = d.n(8, 30), d.n(20, 40), d.n(2, 10)
    q = d.pick(
        f"{p.name} is paid ${rate} an hour for the first {hours} hours of a week and double that "
        f"afterwards. How much does {p.they} make in a week of {hours + extra} hours?",
        f"A workshop pays {p.name} ${rate} per hour, and twice as much for every hour beyond "
        f"{hours}. Last week {p.they} worked {hours + extra} hours. What was {p.their} pay?",
    )
    steps = [
        f"The first {hours} hours bring {d.eq(f'{hours} * {rate}', '$')}.",
        f"{p.name} worked {d.eq(f'{hours + extra} - {hours}')} extra hours.",
        f"An extra hour pays {d.eq(f'{rate} * 2', '$')}.",
        f"The extra hours bring {d.eq(f'{extra} * {rate * 2}', '$')}.",
        f"In total {p.they} makes {d.eq(f'{hours * rate} + {extra * rate * 2}', '$')}.",
    ]
    return Sketch(q, steps, hours * rate + extra * rate * 2)


def weekly_savings(d: Draw) -> Sketch:
    p = d.person()
    income, spent, weeks = d.n(40, 300, 5), d.n(10, 35), d.n(3, 30)
    goal = d.pick("a bike", "a guitar", "a trip", "a camera", "a tent", "a new phone")
    q = d.pick(
        f"{p.name} earns ${income} a week and spends ${spent} of it. {p.They} puts the rest aside "
        f"for {goal}. How much has {p.they} put aside after {weeks} weeks?",
        f"Each week {p.name} receives ${income}, uses ${spent} for food, and saves what is left "
        f"for {goal}. How many dollars are saved in {weeks} weeks?",
    )
    steps = [
        f"Every week {p.name} saves {d.eq(f'{income} - {spent}', '$')}.",
        f"In {weeks} weeks that is {d.eq(f'{income - spent} * {weeks}', '$')}.",
    ]
    return Sketch(q, steps, (income - spent) * weeks)


def discount(d: Draw) -> Sketch:
    p = d.person()
    percent, price = d.n(5, 60, 5), d.n(20, 400, 20)
    item = d.pick(
        "coat", "lamp", "chair", "bicycle", "backpack", "printer", "desk", "watch", "blender"
    )
    off = price * percent // 100
    q = d.pick(
        f"A {item} normally costs ${price}. During a sale it is {percent}% off. What does "
        f"{p.name} pay for it?",
        f"{p.name} finds a {item} priced at ${price} with a discount of {percent}%. What is the "
        f"price after the discount?",
        f"The price of a {item} falls by {percent}% from ${price}. What is the new price in "
        f"dollars?",
    )
    steps = [
        f"The discount is {d.eq(f'{price} * {percent} / 100', '$')}.",
        f"The new price is {d.eq(f'{price} - {off}', '$')}.",
    ]
    return Sketch(q, steps, price - off)


def price_rise(d: Draw) -> Sketch:
    percent, price, count = d.n(10, 50, 10), d.n(10, 90, 10), d.n(2, 9)
    p, x = d.person(), d.thing()
    new = price + price * percent // 100
    q = d.pick(
        f"A box of {x} used to cost ${price}, but the price went up by {percent}%. {p.name} buys "
        f"{count} boxes at the new price. How much does {p.they} pay?",
        f"After an increase of {percent}%, what would {count} boxes of {x} cost {p.name} if one "
        f"box was ${price} before?",
    )
    steps = [
        f"The increase is {d.eq(f'{price} * {percent} / 100', '$')}.",
        f"A box now costs {d.eq(f'{price} + {new - price}', '$')}.",
        f"So {count} boxes cost {d.eq(f'{count} * {new}', '$')}.",
    ]
    return Sketch(q, steps, count * new)


def profit(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    count, cost, gain = d.n(5, 60), d.n(1, 9), d.n(1, 12)
    q = d.pick(
        f"{p.name} bought {count} {x} for ${cost} each and resold all of them for ${cost + gain} "
        f"each. What profit did {p.they} make?",
        f"It costs {p.name} ${cost} to make one of {p.their} {x}, which {p.they} sells at "
        f"${cost + gain}. How much profit do {count} {x} bring?",
    )
    steps = [
        d.pick("The profit on each is ", "Each one brings ")
        + f"{d.eq(f'{cost + gain} - {cost}', '$')}.",
        f"For {count} {x} the profit is {d.eq(f'{count} * {gain}', '$')}.",
    ]
    return Sketch(q, steps, count * gain)


def stall_takings(d: Draw) -> Sketch:
    p, (x, y) = d.person(), d.two_things()
    a, b, c, e, f = d.n(5, 40), d.n(2, 9), d.n(5, 40), d.n(2, 9), d.n(5, 20)
    q = d.pick(
        f"At a fair {p.name} sold {a} {x} for ${b} each and {c} {y} for ${e} each. Renting the "
        f"stall cost ${f}. How much money was left after paying the rent?",
        f"{p.name}'s stall took in money from {a} {x} at ${b} and {c} {y} at ${e}. {p.They} owes "
        f"${f} for the stall itself. How much does {p.they} keep?",
    )
    steps = [
        f"The {x} brought {d.eq(f'{a} * {b}', '$')}.",
        f"The {y} brought {d.eq(f'{c} * {e}', '$')}.",
        f"Together that is {d.eq(f'{a * b} + {c * e}', '$')}.",
        f"After the rent {p.they} keeps {d.eq(f'{a * b + c * e} - {f}', '$')}.",
    ]
    return Sketch(q, steps, a * b + c * e - f)


def split_bill(d: Draw) -> Sketch:
    p = d.person()
    people, each, tip = d.n(2, 9), d.n(6, 40), d.n(1, 6)
    food = people * each
    q = d.pick(
        f"{p.name} and {people - 1} friends eat at a diner. The food costs ${food} and they add a "
        f"tip of ${tip * people}. If they share the cost equally, how much does each pay?",
        f"A group of {people} people, {p.name} among them, has a bill of ${food} plus a tip of "
        f"${tip * people}. They divide it evenly. What is one share?",
    )
    steps = [
        f"The total is {d.eq(f'{food} + {tip * people}', '$')}.",
        f"Each of the {people} people pays {d.eq(f'{food + tip * people} / {people}', '$')}.",
    ]
    return Sketch(q, steps, each + tip)


def saving_for_goal(d: Draw) -> Sketch:
    p = d.person()
    week, weeks, have = d.n(5, 40), d.n(2, 25), d.n(10, 150)
    goal = have + week * weeks
    thing = d.pick(
        "skateboard", "keyboard", "telescope", "drone", "violin", "bookshelf", "microscope"
    )
    q = d.pick(
        f"A {thing} costs ${goal}. {p.name} already has ${have} and can save ${week} each week. "
        f"How many weeks will it take {p.them} to afford it?",
        f"{p.name} dreams of a {thing} that is sold for ${goal}. With ${have} in {p.their} purse "
        f"and ${week} more every week, after how many weeks can {p.they} buy it?",
    )
    steps = [
        f"{p.name} still needs {d.eq(f'{goal} - {have}', '$')}.",
        f"That takes {d.eq(f'{goal - have} / {week}')} weeks.",
    ]
    return Sketch(q, steps, weeks)


def cheaper_offer(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    count, low, more = d.n(3, 30), d.n(2, 12), d.n(1, 8)
    shops = d.pick(
        ("Northgate", "Southgate"), ("the corner shop", "the mall"), ("shop A", "shop B")
    )
    q = (
        f"{p.name} needs {count} {x}. In {shops[0]} they are ${low + more} each, in {shops[1]} "
        f"${low} each. "
        + d.pick(
            "How much is saved by choosing the cheaper place?",
            f"How much less does {p.they} pay in {shops[1]}?",
        )
    )
    steps = [
        f"In {shops[0]} the {x} cost {d.eq(f'{count} * {low + more}', '$')}.",
        f"In {shops[1]} they cost {d.eq(f'{count} * {low}', '$')}.",
        f"The difference is {d.eq(f'{count * (low + more)} - {count * low}', '$')}.",
    ]
    return Sketch(q, steps, count * more)


def monthly_fees(d: Draw) -> Sketch:
    p = d.person()
    fee, months, start = d.n(5, 60), d.n(3, 24), d.n(10, 100, 5)
    club = d.pick(
        "gym", "chess club", "music school", "pool", "library", "film club", "sailing club"
    )
    q = d.pick(
        f"Joining a {club} costs ${start} once and then ${fee} every month. What does {p.name} "
        f"pay for the first {months} months in all?",
        f"{p.name}'s {club} charges ${fee} per month after a single entry fee of ${start}. How "
        f"much has {p.they} paid when {months} months are over?",
    )
    steps = [
        f"The monthly fees add up to {d.eq(f'{fee} * {months}', '$')}.",
        f"With the entry fee it is {d.eq(f'{fee * months} + {start}', '$')}.",
    ]
    return Sketch(q, steps, fee * months + start)


def unit_price(d: Draw) -> Sketch:
    p, x = d.person(), d.thing()
    pack, unit, want = d.n(3, 12), d.n(2, 12), d.n(13, 40)
    q = d.pick(
        f"A pack of {pack} {x} costs ${pack * unit}. At the same price per piece, what would "
        f"{want} {x} cost {p.name}?",
        f"If {p.name} pays ${pack * unit} for {pack} {x}, how many dollars do {want} {x} cost?",
    )
    steps = [
        f"One costs {d.eq(f'{pack * unit} / {pack}', '$')}.",
        f"So {want} {x} cost {d.eq(f'{want} * {unit}', '$')}.",
    ]
    return Sketch(q, steps, want * unit)


def allowance_split(d: Draw) -> Sketch:
    p = d.person()
    total, part = d.pick(40, 60, 80, 120, 160, 200, 240, 360), d.pick(2, 4, 5)
    bought = total // part
    spend = d.n(3, 15)
    word = {2: "half", 4: "a quarter", 5: "a fifth"}[part]
    q = d.pick(
        f"{p.name} got ${total} for {p.their} birthday. {p.They} gave {word} of it to {p.their} "
        f"sister and spent ${spend} on snacks. How much is left?",
        f"Out of ${total}, {p.name} pays {word} for rent and then ${spend} for a bus ticket. How "
        f"many dollars remain?",
    )
    steps = [
        d.pick("The first part is ", f"{word.capitalize()} of ${total} is ")
        + f"{d.eq(f'{total} / {part}', '$')}.",
        f"Then {d.eq(f'{total} - {bought}', '$')} is left.",
        f"In the end {p.they} has {d.eq(f'{total - bought} - {spend}', '$')}.",
    ]
    return Sketch(q, steps, total - bought - spend)


def commission(d: Draw) -> Sketch:
    p = d.person()
    base, percent, sales = d.n(100, 900, 50), d.n(5, 20, 5), d.n(200, 4000, 100)
    cut = sales * percent // 100
    q = (
        f"{p.name} receives a fixed ${base} a week plus {percent}% of what {p.they} sells. This "
        f"week {p.they} sold goods for ${sales}. "
        + d.pick("How much does the week bring?", "What are the week's earnings?")
    )
    steps = [
        f"The share of the sales is {d.eq(f'{sales} * {percent} / 100', '$')}.",
        f"The week brings {d.eq(f'{base} + {cut}', '$')}.",
    ]
    return Sketch(q, steps, base + cut)


TEMPLATES: tuple[Template, ...] = (
    two_purchases,
    change_back,
    wages_with_overtime,
    weekly_savings,
    discount,
    price_rise,
    profit,
    stall_takings,
    split_bill,
    saving_for_goal,
    cheaper_offer,
    monthly_fees,
    unit_price,
    allowance_split,
    commission,
)
