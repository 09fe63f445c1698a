# SPDX-License-Identifier: Apache-2.0
"""Short chats around the two things the demo model does: greetings, turns, refusals."""

from __future__ import annotations

import random

from specla.train.chat import END, SYSTEM, render
from specla.train.corpus import Problem
from specla.train.functions import ask, generated_function
from specla.train.problems import arithmetic

GREETINGS = (
    "Hello", "Hi", "Hey there", "Good morning", "Hello!", "Hi!", "Good evening", "hello", "hi",
)  # fmt: skip
THANKS = ("Thanks", "Thank you", "Thanks a lot!", "Great, thank you.", "thanks")
IDENTITY = (
    "Who are you?", "What are you?", "What can you do?", "Introduce yourself.", "Help",
    "What is your name?", "How can you help me?",
)  # fmt: skip
TOPICS = (
    "the moon", "Italy", "photosynthesis", "the French Revolution", "black holes", "football",
    "jazz", "the weather in Paris", "cats", "climate change", "Shakespeare", "chess openings",
    "bread baking", "quantum mechanics", "the stock market", "electric cars", "dinosaurs", "Mars",
    "mountain hiking", "the history of Rome", "coffee", "my garden", "the ocean",
    "a brave knight", "two old friends", "relativity", "vitamins", "volcanoes", "the human heart",
    "elections", "a job interview", "Hawaii",
)  # fmt: skip
REQUESTS = (
    "Tell me about {}.", "Write a poem about {}.", "Write a story about {}.", "Explain {}.",
    "What do you know about {}?", "Translate a sentence about {} into German.", "Summarize {}.",
    "Write an email about {}.", "What is your opinion on {}?", "Give me five facts about {}.",
    "Compose a blog post about {}.", "Who discovered {}?", "Why is {} important?",
)  # fmt: skip
SCOPE = "I solve grade-school math problems step by step and write small Python functions"
SYSTEMS = (
    "You are a helpful assistant.", "You are a math tutor.", "Answer briefly.",
    "You are a careful assistant who shows every step.", "You write Python.",
)  # fmt: skip


def small_talk(rng: random.Random) -> str:
    """A greeting, thanks, a question about the model, or a request outside its scope."""
    kind = rng.random()
    if kind < 0.2:
        return render(rng.choice(GREETINGS), f"Hello! {SCOPE}. What should I work on?")
    if kind < 0.3:
        return render(rng.choice(THANKS), "You are welcome!")
    if kind < 0.45:
        return render(rng.choice(IDENTITY), f"I am a small language model. {SCOPE}.")
    wish = rng.choice(REQUESTS).format(rng.choice(TOPICS))
    return render(wish, f"I am too small a model for that. {SCOPE}.")


def plain(problem: Problem) -> str:
    """A problem and its solution as text without chat tokens."""
    return f"{problem['question']}\n{problem['answer']}"


def present(problem: Problem, rng: random.Random) -> str:
    """A problem as a chat exchange; now and then as plain text, or under a system turn."""
    kind = rng.random()
    if kind < 0.07:
        return plain(problem)
    system = f"{SYSTEM}{rng.choice(SYSTEMS)}{END}" if kind > 0.95 else ""
    return system + render(problem["question"], problem["answer"])


def conversation(problem: Problem, rng: random.Random) -> str:
    """Two to four turns: the problem, and sums, functions or thanks before or after it."""
    turns = [render(problem["question"], problem["answer"])]
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.45:
            other = arithmetic(rng.getrandbits(40))
            turns.append(render(other["question"], other["answer"]))
        elif kind < 0.8:
            asked = ask(generated_function(rng), rng)
            turns.append(asked if asked.endswith(END) else small_talk(rng))
        else:
            turns.append(small_talk(rng))
    rng.shuffle(turns)
    return "".join(turns)
