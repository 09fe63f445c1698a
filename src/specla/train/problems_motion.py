# SPDX-License-Identifier: Apache-2.0
"""Word problems about time, distance, rates, measures and schedules."""

from __future__ import annotations

from specla.train.sketch import Draw, Sketch, Template


def distance_two_legs(d: Draw) -> Sketch:
    p = d.person()
    v, t, w, s = d.n(3, 90), d.n(2, 9), d.n(3, 90), d.n(2, 9)
    way = d.pick("drives", "rides", "travels")
    q = d.pick(
        f"{p.name} {way} {t} hours at {v} km per hour and then {s} hours at {w} km per hour. How "
        f"many kilometers is that in total?",
        f"On a trip {p.name} keeps a speed of {v} km/h for {t} hours, and of {w} km/h for another "
        f"{s} hours. How long is the trip in kilometers?",
    )
    steps = [
        f"The first part is {d.eq(f'{v} * {t}')} km.",
        f"The second part is {d.eq(f'{w} * {s}')} km.",
        f"The whole trip is {d.eq(f'{v * t} + {w * s}')} km.",
    ]
    return Sketch(q, steps, v * t + w * s)


def time_for_distance(d: Draw) -> Sketch:
    p = d.person()
    v, t, rest = d.n(4, 80), d.n(2, 12), d.n(1, 4)
    q = d.pick(
        f"{p.name} has to cover {v * t} miles at {v} miles per hour and takes {rest} hours of "
        f"breaks. After how many hours does {p.they} arrive?",
        f"The road to the coast is {v * t} miles long. {p.name} goes {v} miles in an hour and "
        f"rests for {rest} hours on the way. How many hours does the journey last?",
    )
    steps = [
        f"Moving takes {d.eq(f'{v * t} / {v}')} hours.",
        f"With breaks the journey lasts {d.eq(f'{t} + {rest}')} hours.",
    ]
    return Sketch(q, steps, t + rest)


def reading_pages(d: Draw) -> Sketch:
    p = d.person()
    per, days, left = d.n(5, 60), d.n(2, 14), d.n(3, 20)
    total = per * days + per * left
    q = d.pick(
        f"A novel has {total} pages. {p.name} reads {per} pages a day. After {days} days, how "
        f"many more days are needed to finish it?",
        f"{p.name} reads {per} pages every evening of a book with {total} pages. {days} evenings "
        f"have passed. How many evenings remain?",
    )
    steps = [
        f"So far {p.name} has read {d.eq(f'{per} * {days}')} pages.",
        f"There are {d.eq(f'{total} - {per * days}')} pages left.",
        f"That takes {d.eq(f'{per * left} / {per}')} more days.",
    ]
    return Sketch(q, steps, left)


def tank_filling(d: Draw) -> Sketch:
    fill, leak, minutes, start = d.n(6, 40), d.n(1, 5), d.n(5, 60), d.n(10, 200, 5)
    tank = d.pick("tank", "pool", "barrel", "pond", "cistern")
    q = d.pick(
        f"A {tank} holds {start} liters. A pipe adds {fill} liters a minute while {leak} liters a "
        f"minute leak out. How many liters are in the {tank} after {minutes} minutes?",
        f"Every minute {fill} liters flow into a {tank} and {leak} liters flow out. It had "
        f"{start} liters at first. What does it hold {minutes} minutes later?",
    )
    steps = [
        f"Each minute the {tank} gains {d.eq(f'{fill} - {leak}')} liters.",
        f"In {minutes} minutes it gains {d.eq(f'{fill - leak} * {minutes}')} liters.",
        f"Then it holds {d.eq(f'{start} + {(fill - leak) * minutes}')} liters.",
    ]
    return Sketch(q, steps, start + (fill - leak) * minutes)


def machine_output(d: Draw) -> Sketch:
    x = d.thing()
    rate, hours, days, bad = d.n(5, 90), d.n(2, 12), d.n(2, 7), d.n(1, 30)
    total = rate * hours * days
    q = d.pick(
        f"A machine makes {rate} {x} an hour and runs {hours} hours a day. Over {days} days, "
        f"{bad} of the {x} turn out faulty. How many good {x} are there?",
        f"Running {hours} hours daily, a machine turns out {rate} {x} each hour. After {days} "
        f"days {bad} are thrown away. How many {x} remain?",
    )
    steps = [
        f"A day gives {d.eq(f'{rate} * {hours}')} {x}.",
        f"The {days} days give {d.eq(f'{rate * hours} * {days}')} {x}.",
        f"Without the faulty ones that is {d.eq(f'{total} - {bad}')}.",
    ]
    return Sketch(q, steps, total - bad)


def practice_minutes(d: Draw) -> Sketch:
    p = d.person()
    a, b, days, weeks = d.n(10, 60, 5), d.n(5, 45, 5), d.n(2, 6), d.n(2, 9)
    one, two = d.pick(("piano", "flute"), ("running", "swimming"), ("Spanish", "French"))
    q = d.pick(
        f"On {days} days a week {p.name} spends {a} minutes on {one} and {b} minutes on {two}. "
        f"How many minutes is that in {weeks} weeks?",
        f"{p.name} does {a} minutes of {one} and {b} minutes of {two} on each of {days} days per "
        f"week. How many minutes add up over {weeks} weeks?",
    )
    steps = [
        f"On one day it is {d.eq(f'{a} + {b}')} minutes.",
        f"In a week it is {d.eq(f'{a + b} * {days}')} minutes.",
        f"In {weeks} weeks it is {d.eq(f'{(a + b) * days} * {weeks}')} minutes.",
    ]
    return Sketch(q, steps, (a + b) * days * weeks)


def hours_and_minutes(d: Draw) -> Sketch:
    p = d.person()
    hours, minutes, minus = d.n(1, 6), d.n(5, 55, 5), d.n(5, 40, 5)
    what = d.pick("a film", "a concert", "a meeting", "a flight", "an exam", "a match")
    q = d.pick(
        f"{p.name} plans {hours} hours and {minutes} minutes for {what}, but it ends {minus} "
        f"minutes early. How many minutes did it last?",
        f"How many minutes does {what} last if it was meant to take {hours} hours and {minutes} "
        f"minutes and {p.name} leaves {minus} minutes before the end?",
    )
    steps = [
        f"{hours} hours are {d.eq(f'{hours} * 60')} minutes.",
        f"The plan was {d.eq(f'{hours * 60} + {minutes}')} minutes.",
        f"It lasted {d.eq(f'{hours * 60 + minutes} - {minus}')} minutes.",
    ]
    return Sketch(q, steps, hours * 60 + minutes - minus)


def rectangle_fence(d: Draw) -> Sketch:
    p = d.person()
    a, b, cost = d.n(3, 60), d.n(3, 60), d.n(2, 15)
    place = d.pick("garden", "field", "yard", "playground", "paddock")
    q = d.pick(
        f"A rectangular {place} is {a} meters long and {b} meters wide. A fence costs ${cost} a "
        f"meter. What does {p.name} pay to fence the whole {place}?",
        f"{p.name} puts a fence around a {place} of {a} m by {b} m. One meter of fence is "
        f"${cost}. What is the cost in dollars?",
    )
    steps = [
        f"Length and width together are {d.eq(f'{a} + {b}')} meters.",
        f"The whole fence is {d.eq(f'{a + b} * 2')} meters long.",
        f"It costs {d.eq(f'{(a + b) * 2} * {cost}', '$')}.",
    ]
    return Sketch(q, steps, (a + b) * 2 * cost)


def floor_tiles(d: Draw) -> Sketch:
    p = d.person()
    a, b, per, have = d.n(3, 20), d.n(3, 20), d.n(2, 9), d.n(5, 50)
    need = a * b * per
    have = min(have, need - 1)
    q = d.pick(
        f"A floor measures {a} m by {b} m, and each square meter takes {per} tiles. {p.name} "
        f"already has {have} tiles. How many more must {p.they} get?",
        f"{p.name} tiles a room of {a} meters by {b} meters with {per} tiles per square meter. If "
        f"{have} tiles are in stock, how many are missing?",
    )
    steps = [
        f"The area is {d.eq(f'{a} * {b}')} square meters.",
        f"It takes {d.eq(f'{a * b} * {per}')} tiles.",
        f"So {d.eq(f'{need} - {have}')} more are needed.",
    ]
    return Sketch(q, steps, need - have)


def cut_rope(d: Draw) -> Sketch:
    p = d.person()
    piece, count, rest = d.n(2, 25), d.n(3, 20), d.n(1, 40)
    stuff = d.pick("rope", "ribbon", "wire", "cable", "string", "pipe")
    total = piece * count + rest
    q = d.pick(
        f"From {total} meters of {stuff}, {p.name} cuts {count} pieces of {piece} meters. How "
        f"many meters remain?",
        f"{p.name} needs {count} pieces of {stuff}, {piece} meters each, and has {total} meters. "
        f"What length is left over?",
    )
    steps = [
        f"The pieces use {d.eq(f'{count} * {piece}')} meters.",
        f"There remain {d.eq(f'{total} - {count * piece}')} meters.",
    ]
    return Sketch(q, steps, rest)


def work_rates(d: Draw) -> Sketch:
    p, r = d.person(), d.person()
    a, b, t = d.n(2, 40), d.n(2, 40), d.n(2, 12)
    job, unit = d.pick(
        ("fold", "shirts"), ("pack", "parcels"), ("paint", "signs"),
        ("peel", "potatoes"), ("write", "cards"), ("plant", "trees"),
    )  # fmt: skip
    q = d.pick(
        f"{p.name} can {job} {a} {unit} per hour and {r.name} {b} per hour. Working side by side "
        f"for {t} hours, how many {unit} do they {job}?",
        f"In an hour {p.name} and {r.name} {job} {a} and {b} {unit}. How many {unit} is that in "
        f"{t} hours of common work?",
    )
    steps = [
        f"Together they {job} {d.eq(f'{a} + {b}')} {unit} an hour.",
        f"In {t} hours that is {d.eq(f'{a + b} * {t}')} {unit}.",
    ]
    return Sketch(q, steps, (a + b) * t)


def temperature_steps(d: Draw) -> Sketch:
    start, drop, hours, rise = d.n(18, 80), d.n(1, 4), d.n(2, 4), d.n(1, 15)
    place = d.pick("a greenhouse", "an oven", "the lake", "a lab", "the desert", "a cellar")
    q = d.pick(
        f"The temperature in {place} is {start} degrees. It falls by {drop} degrees an hour for "
        f"{hours} hours and then rises by {rise} degrees. What is it now?",
        f"In {place} a thermometer shows {start} degrees, loses {drop} degrees each hour for "
        f"{hours} hours, and then gains {rise}. What does it show?",
    )
    steps = [
        f"It falls by {d.eq(f'{drop} * {hours}')} degrees.",
        f"Then it is {d.eq(f'{start} - {drop * hours}')} degrees.",
        f"After the rise it is {d.eq(f'{start - drop * hours} + {rise}')} degrees.",
    ]
    return Sketch(q, steps, start - drop * hours + rise)


def fuel_use(d: Draw) -> Sketch:
    p = d.person()
    per, liters, price = d.n(5, 25), d.n(4, 40), d.n(2, 6)
    car = d.pick("car", "van", "truck", "motorbike", "minibus")
    q = d.pick(
        f"{p.name}'s {car} goes {per} km on a liter of fuel. A liter costs ${price}. What does "
        f"fuel for {per * liters} km cost?",
        f"With one liter a {car} travels {per} km. {p.name} plans a tour of {per * liters} km and "
        f"pays ${price} per liter. How many dollars go into fuel?",
    )
    steps = [
        f"The {car} needs {d.eq(f'{per * liters} / {per}')} liters.",
        f"They cost {d.eq(f'{liters} * {price}', '$')}.",
    ]
    return Sketch(q, steps, liters * price)


def bus_passengers(d: Draw) -> Sketch:
    a, b, c, e = d.n(10, 60), d.n(2, 9), d.n(2, 20), d.n(2, 9)
    f = d.n(1, 15)
    line = d.pick("bus", "tram", "train car", "ferry")
    q = d.pick(
        f"A {line} leaves with {a} people. At the first stop {b} get off and {c} get on; at the "
        f"second {e} get off and {f} get on. How many people are on the {line} now?",
        f"{a} passengers sit in a {line}. Then {b} leave and {c} enter, and later {e} leave and "
        f"{f} enter. How many passengers are there?",
    )
    steps = [
        f"After the first stop there are {d.eq(f'{a} - {b} + {c}')} people.",
        f"After the second there are {d.eq(f'{a - b + c} - {e} + {f}')} people.",
    ]
    return Sketch(q, steps, a - b + c - e + f)


def steps_walked(d: Draw) -> Sketch:
    p = d.person()
    base, more, days = d.n(1000, 9000, 100), d.n(100, 900, 100), d.n(2, 5)
    total = sum(base + more * i for i in range(days))
    amounts = [base + more * i for i in range(days)]
    q = d.pick(
        f"On Monday {p.name} walks {base} steps. Each following day {p.they} walks {more} steps "
        f"more than the day before. How many steps is that in the first {days} days?",
        f"{p.name} starts with {base} steps and adds {more} every day. What is the total of "
        f"{days} days?",
    )
    steps = [f"Day {i + 2}: {d.eq(f'{s} + {more}')} steps." for i, s in enumerate(amounts[:-1])]
    steps.append(f"Altogether: {d.eq(' + '.join(map(str, amounts)))} steps.")
    return Sketch(q, steps, total)


TEMPLATES: tuple[Template, ...] = (
    distance_two_legs,
    time_for_distance,
    reading_pages,
    tank_filling,
    machine_output,
    practice_minutes,
    hours_and_minutes,
    rectangle_fence,
    floor_tiles,
    cut_rope,
    work_rates,
    temperature_steps,
    fuel_use,
    bus_passengers,
    steps_walked,
)
