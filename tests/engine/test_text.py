# SPDX-License-Identifier: Apache-2.0
"""Incremental text: equal to decoding at once, whatever the chunks; stop strings cut tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specla.engine.text import Decoder, TextStream
from specla.models.tokenizer import Tokenizer as SpeclaTokenizer

CORPUS = [
    "The cat sat on the mat. The cat ran; the dog sat.\n\nStop here, please.",
    "\u6f22\u5b57\u3068\u4eee\u540d\u3001\u6f22\u5b57\u3002 caf\u00e9 cafe\u0301 na\u00efve",
    "def f(x):\n    return x + 1\n",
]
# Emoji beyond the corpus (4 bytes, 4 tokens), a joined one, combining marks, CJK, and U+FFFD.
TEXT = "The cat \U0001f600\U0001f468\u200d\U0001f469 a\u0301\u0323\u6f22\u5b57\u4f60\u597d\ufffd\n"


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 entries with two special tokens (ids 0 and 1)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<end>", "<user>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", extra_special_tokens=["<user>"]
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """A sentencepiece-like tokenizer: words with a leading space, which decoding drops at the
    start, and single bytes for everything else."""
    pieces = ["<end>", "\u2581The", "\u2581cat", "s", "\u2581"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


BPE = byte_level()
SENTENCEPIECE = byte_fallback()
BYTE_LEVEL = SpeclaTokenizer(BPE, ())
BYTE_FALLBACK = SpeclaTokenizer(SENTENCEPIECE, ())
VOCAB_SIZE = BYTE_LEVEL.vocab_size


def encode(text: str) -> list[int]:
    return BYTE_LEVEL.encode(text, add_special_tokens=False)


def byte_tokens(data: bytes) -> list[int]:
    """One token per byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # Byte-level BPE writes printable bytes as themselves, the others from U+0100 on, in order.
    others = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    letters = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
    return [token_id(BPE, letters[byte]) for byte in data]


def token_id(tokenizer: PreTrainedTokenizerFast, piece: str) -> int:
    found = tokenizer.convert_tokens_to_ids(piece)
    assert isinstance(found, int)
    return found


def decode(ids: Sequence[int], skip: bool = True, tokenizer: Decoder = BYTE_LEVEL) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=skip)


def run(
    chunks: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
    *,
    tokenizer: Decoder = BYTE_LEVEL,
    prompt: Sequence[int] = (),
    skip: bool = True,
    min_tokens: int = 0,
) -> tuple[str, str | None, int]:
    """Text, stop reason and token count of a whole stream."""
    stream = TextStream(
        tokenizer,
        prompt_token_ids=prompt,
        stop=stop,
        skip_special_tokens=skip,
        min_tokens=min_tokens,
    )
    deltas = [stream.put(chunk) for chunk in chunks] + [stream.finish()]
    return "".join(d.text for d in deltas), deltas[-1].stop_reason, deltas[-1].num_tokens


def split(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """`ids` in chunks that end at `cuts` (taken modulo the length)."""
    places = sorted({cut % (len(ids) + 1) for cut in cuts})
    bounds = [0, *places, len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def expected(ids: Sequence[int], stop: Sequence[str], skip: bool) -> tuple[str, str | None, int]:
    """The definition: decode at once, cut before the stop string that is complete first, keep the
    shortest prefix of tokens that covers the text."""
    text = decode(ids, skip)
    found = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return text, None, len(ids)
    end, _, reason = min(found)
    kept = text[: end - len(reason)]
    covers = (n for n in range(len(ids) + 1) if decode(ids[:n], skip).startswith(kept))
    return kept, reason, next(covers)


any_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
some_bytes = st.binary(max_size=24).map(byte_tokens)
some_text = st.text("The cat\u00e9\u6f22\u0301\U0001f600\ufffd\n", max_size=16).map(encode)
outputs = st.lists(st.one_of(any_ids, some_bytes, some_text), max_size=4).map(
    lambda parts: [token for part in parts for token in part]
)
stops = st.lists(
    st.one_of(
        st.text("The cat\u00e9\u6f22\U0001f600", min_size=1, max_size=4),
        st.sampled_from(["at", "aa", "aab", "\ufffd", "\ufffd\ufffd", "cat cat", "\n"]),
    ),
    max_size=3,
).map(tuple)


@given(outputs, stops, st.lists(st.integers(0, 200), max_size=6), st.booleans())
@example(byte_tokens(b"\xf0\x9f\x98"), (), [1, 2], True)
@example(byte_tokens(b"\xf0\x9f\x98at"), ("at",), [1, 2], True)
@example(byte_tokens(b"\xff\xff\xff\xff\xff\xffat"), ("at",), [3], True)
@example([*byte_tokens(b"\xf0\x9f"), 0, *byte_tokens(b"\x98\x80")], (), [2], True)
@example([*encode("cat"), 0, 0, *encode(" sat")], (" sat",), [2], True)
def test_any_chunking_equals_decoding_at_once(
    ids: list[int], stop: tuple[str, ...], cuts: list[int], skip: bool
) -> None:
    assert run(split(ids, cuts), stop, skip=skip) == expected(ids, stop, skip)


@given(outputs, stops, st.lists(st.integers(0, 200), max_size=6))
def test_what_is_delivered_is_final(
    ids: list[int], stop: tuple[str, ...], cuts: list[int]
) -> None:
    """Deltas only grow a prefix of the final text, and certain tokens are never cut."""
    text, _, num_tokens = expected(ids, stop, True)
    stream, so_far, certain = TextStream(BYTE_LEVEL, stop=stop), "", 0
    for chunk in split(ids, cuts):
        delta = stream.put(chunk)
        so_far += delta.text
        assert text.startswith(so_far)
        assert certain <= delta.num_tokens <= num_tokens
        assert decode(ids[: delta.num_tokens]).startswith(so_far)
        certain = delta.num_tokens
    assert so_far + stream.finish().text == text
    assert stream.finish().text == ""


@given(outputs, st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12))
def test_prompt_is_context_but_never_output(ids: list[int], prompt: list[int]) -> None:
    assert run([ids], prompt=prompt)[0] == decode(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_characters_over_several_tokens_come_whole(size: int) -> None:
    """Case 42 of reference section 8: no U+FFFD that the text does not have."""
    ids = encode(TEXT)
    stream = TextStream(BYTE_LEVEL, prompt_token_ids=encode("Hello"))
    deltas = [stream.put(ids[i : i + size]).text for i in range(0, len(ids), size)]
    assert "".join(deltas).count("\ufffd") == 1
    assert "".join([*deltas, stream.finish().text]) == TEXT


def test_emoji_byte_by_byte() -> None:
    stream = TextStream(BYTE_LEVEL)
    texts = [stream.put([token]).text for token in byte_tokens("\U0001f600".encode())]
    assert texts == ["", "", "", "\U0001f600"]


def test_unfinished_character_becomes_a_replacement_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL)
    assert stream.put(byte_tokens("\U0001f600".encode()[:3])).text == ""
    assert stream.finish().text == "\ufffd"


@pytest.mark.parametrize("size", range(1, 12))
def test_multibyte_text_with_a_stop_string(size: int) -> None:
    """Case 41 of reference section 8: a cut is a place between characters."""
    ids = encode("\u4f60\u597d\U0001f600 caf\u00e9ZZZ\U0001f600")
    text, reason, kept = run([ids[i : i + size] for i in range(0, len(ids), size)], ("ZZZ",))
    assert (text, reason) == ("\u4f60\u597d\U0001f600 caf\u00e9", "ZZZ")
    assert decode(ids[:kept]) == text


def test_stop_string_over_two_tokens_trims_tokens() -> None:
    """Case 18 of reference section 8: text, ids, logprobs and usage end at the same token."""
    ids = [*encode("The dog"), *encode("."), *encode("\n"), *encode(" The cat")]
    text, reason, kept = run([ids], (".\n",))
    assert (text, reason) == ("The dog", ".\n")
    assert decode(ids[:kept]) == text


def test_stop_string_inside_a_token_keeps_that_token() -> None:
    (token,) = encode(" cat")
    text, reason, kept = run([[*encode("The"), token, *encode(" sat")]], ("at",))
    assert (text, reason, kept) == ("The c", "at", 2)


def test_stop_string_at_the_start_keeps_nothing() -> None:
    assert run([encode("Stop here")], ("Stop",)) == ("", "Stop", 0)


def test_partial_stop_string_is_delivered_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, stop=(" sat on",))
    delta = stream.put(encode("The cat sat"))
    assert (delta.text, delta.num_tokens) == ("The cat", len(encode("The cat")))
    assert stream.holds_back
    last = stream.finish()
    assert (last.text, last.stop_reason) == (" sat", None)
    assert last.num_tokens == len(encode("The cat sat"))
    assert not stream.holds_back


def test_first_complete_stop_wins_and_the_longest_of_those() -> None:
    assert run([encode("The cat sat")], ("cat sat", "at s", "t s"))[:2] == ("The c", "at s")


def test_put_after_a_stop_changes_nothing() -> None:
    stream = TextStream(BYTE_LEVEL, stop=("cat",))
    first = stream.put(encode("The cat sat"))
    again = stream.put(encode(" on the mat"))
    assert (again.text, again.stop_reason, again.num_tokens) == ("", "cat", first.num_tokens)
    assert stream.finish().text == ""
    assert not stream.holds_back


@given(st.integers(0, 12), st.lists(st.integers(0, 20), max_size=4))
def test_stop_before_min_tokens_is_ordinary_text(min_tokens: int, cuts: list[int]) -> None:
    ids = encode("a.") * 5  # two tokens each: a stop string completes at 2, 4, 6, 8, 10
    assert len(ids) == 10
    text, reason, kept = run(split(ids, cuts), (".",), min_tokens=min_tokens)
    complete = next((n for n in (2, 4, 6, 8, 10) if n >= min_tokens), None)
    if complete is None:
        assert (text, reason, kept) == ("a." * 5, None, 10)
    else:
        assert (text, reason, kept) == (decode(ids[: complete - 1]), ".", complete - 1)


@pytest.mark.parametrize("data", [b"\x80", b"\xf0\x9f\x98", b"\xe6\xbc\xe6", b"\xff"])
def test_endless_invalid_bytes_are_delivered_in_constant_windows(data: bytes) -> None:
    longest = 0

    class Counting:
        def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids, skip_special_tokens)

    ids = byte_tokens(data * 300)
    stream = TextStream(Counting())
    text = "".join(stream.put([token]).text for token in ids)
    assert len(text) > 200
    assert text + stream.finish().text == decode(ids)
    assert longest < 50


def test_skipped_special_tokens_do_not_pile_up() -> None:
    stream = TextStream(BYTE_LEVEL, prompt_token_ids=encode("The"))
    assert stream.put([1] * 200).text == ""
    assert stream.put(encode(" cat")).text == " cat"


def test_byte_fallback_keeps_the_space_after_the_prompt() -> None:
    pieces = ("\u2581The", "\u2581cat", "s", "\u2581")
    the, cat, s, space = (token_id(SENTENCEPIECE, piece) for piece in pieces)
    assert run([[cat, s], [space, the]], tokenizer=BYTE_FALLBACK, prompt=[the])[0] == " cats  The"
    assert run([[cat], [s]], tokenizer=BYTE_FALLBACK)[0] == "cats"


@given(st.text("\u4f60\u00e9\U0001f600", max_size=8), st.lists(st.integers(0, 40), max_size=5))
@example("\u4f60\u597d", [1, 2, 3, 4, 5])
def test_byte_fallback_runs_of_characters(text: str, cuts: list[int]) -> None:
    """Neighbours of one run of bytes are spoilt until it is complete; none of that is shown."""
    ids = [token_id(SENTENCEPIECE, f"<0x{byte:02X}>") for byte in text.encode()]
    assert run(split(ids, cuts), tokenizer=BYTE_FALLBACK)[0] == text


def test_byte_fallback_garbage_ends_and_stays_bounded() -> None:
    garbage = ("<0xC3>", "<0xA9>", *["<0xF0>"] * 600)
    ids = [token_id(SENTENCEPIECE, piece) for piece in garbage]
    text = run([ids], tokenizer=BYTE_FALLBACK)[0]
    assert set(text) <= {"\u00e9", "\ufffd"}
    assert len(text) == len(decode(ids, tokenizer=BYTE_FALLBACK))


def test_spaces_are_not_cleaned_up() -> None:
    assert run([encode("a , b . c 's")])[0] == "a , b . c 's"
