# SPDX-License-Identifier: Apache-2.0
"""Tokenizer, chat template, generators and the text sources' splits."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import specla.train
from specla.train import chat, corpus, functions, mining, problems, talk
from specla.train.greedy import Decoded, loops, rambles
from specla.train.sandbox import agrees

DEMO = Path(specla.train.__file__).parents[1] / "assets" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@given(st.text())
def test_tokenizer_is_lossless(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["12345", " 60 + 7.25", "x2 = 10"])
def test_digits_are_single_tokens(text):
    pieces = [TOKENIZER.decode([i]) for i in TOKENIZER.encode(text).ids]
    assert all(piece.isdigit() <= (len(piece) == 1) for piece in pieces)
    assert not any(c.isdigit() for piece in pieces for c in piece if len(piece) > 1)


def test_special_tokens_have_their_ids():
    ids = [TOKENIZER.token_to_id(token) for token in chat.SPECIAL_TOKENS]
    assert ids == [0, chat.USER_ID, chat.ASSISTANT_ID, chat.SYSTEM_ID, chat.END_ID]
    assert TOKENIZER.get_vocab_size() == 8192


def test_chat_template_is_the_training_format():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    turns = [{"role": "user", "content": "2+2? "}, {"role": "assistant", "content": " 4"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == chat.render("2+2? ", " 4")
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == chat.render("2+2? ")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[: len(tokenizer(prompt)["input_ids"])] == tokenizer(prompt)["input_ids"]
    assert tokenizer.eos_token == chat.END
    assert ids == TOKENIZER.encode(text).ids
    with pytest.raises(Exception, match="role must be"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}], tokenize=False)


def test_generated_solutions_are_right():
    rows = list(problems.word_problems(range(3000)))
    assert len({row["question"] for row in rows}) > 0.99 * len(rows)
    for row in rows:
        steps, _, final = row["answer"].rpartition("#### ")
        found = problems.equations(steps)
        assert all(abs(value - written) < 1e-3 for _, value, written in found), row
        assert found[-1][2] == float(final) >= 0, row


def test_every_template_works():
    list(problems.word_problems(range(1)))
    assert len(problems.TEMPLATES) >= 40
    for make in problems.TEMPLATES.values():
        sketch = make(problems.Draw(random.Random(5)))
        assert sketch.question.rstrip().endswith("?")
        assert sketch.steps


def test_arithmetic_is_right():
    for seed in range(500):
        row = problems.arithmetic(seed)
        ((_, value, written),) = problems.equations(row["answer"].split("\n")[0])
        assert value == pytest.approx(written), row


def test_held_out_problems_are_disjoint_from_training():
    train = {row["question"] for row in problems.word_problems(range(2000))}
    held = {row["question"] for row in problems.word_problems(range(2000), held_out=True)}
    assert held
    assert not held & train


def test_generated_functions_compile_and_agree_with_themselves():
    rng = random.Random(0)
    for i in range(150):
        function = functions.generated_function(rng)
        compile(function.source(), function.name, "exec")
        document = functions.ask(function, rng)
        assert document.endswith((chat.END, "\n"))
        if i < 20 and function.signature.count(",") == 0 and "path" not in function.signature:
            assert agrees(function.source(doc=False), function.source(), function.name)


def test_sandbox_tells_wrong_from_right():
    right = "def f(x):\n    return x % 2 == 0\n"
    assert agrees(right, right, "f")
    assert not agrees("def f(x):\n    return x % 2 == 1\n", right, "f")
    assert not agrees("def f(x:\n", right, "f")
    assert not agrees("def f(x):\n    while True: pass\n", "def f(x):\n    return len(x)\n", "f")


def test_mining_keeps_short_documented_functions():
    source = '''
class A:
    def area(self, r: float) -> float:
        """Compute the area of a circle. More text."""
        return 3 * r

def bare(x):
    return x
'''
    (found,) = mining.mine_functions(source)
    assert found.signature == "area(self, r: float) -> float"
    assert found.does == "compute the area of a circle"
    assert found.body == "    return 3 * r\n"


def test_conversations_are_whole_turns():
    problem = problems.word_problem(3)
    for seed in range(50):
        text = talk.conversation(problem, random.Random(seed))
        assert text.startswith(chat.USER)
        assert text.endswith(chat.END)
        assert text.count(chat.USER) == text.count(chat.ASSISTANT) == text.count(chat.END) / 2


def test_calculator_marks_are_stripped():
    assert corpus.strip_marks("48/2 = <<48/2=24>>24 clips") == "48/2 = 24 clips"


def test_loop_detector():
    assert loops([1, 2] * 20)
    assert not loops(list(range(60)))
    assert rambles(Decoded("", list(range(400)), False))
    assert not rambles(Decoded("", list(range(30)), True))


def test_the_shipped_config_is_explicit():
    config = json.loads((DEMO / "config.json").read_text())
    for field in (
        "num_heads",
        "head_dim",
        "expand_v",
        "num_hidden_layers",
        "norm_eps",
        "hidden_size",
    ):
        assert config[field] is not None
    shards = sorted(DEMO.glob("*.safetensors"))
    assert sum(s.stat().st_size for s in shards) <= 26_000_000
    assert max(s.stat().st_size for s in shards) <= 15 * 2**20
