# SPDX-License-Identifier: Apache-2.0
"""TextStream: token ids in, text out, as soon as a piece of text can no longer change.

Held back are bytes that may be the start of a character, and characters that may be the start
of a stop string. Tokens are taken one at a time, whatever the size of a `put`, so that text, cut
and stop reason are functions of the token sequence alone (the chunking invariant).

Invariant: the deltas concatenate to `decode(token_ids)` without clean-up of spaces; after a stop
string they concatenate to the part before it, and `num_tokens` is the length of the shortest
prefix of the ids whose decoded text starts with that part. So text, ids, logprobs and usage of
one completion agree: they all end with the token in which the text ends. Where a stop string
begins inside a token, that token is kept and only its text is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

# What a decoder writes for bytes that are not UTF-8, be it for good or until more bytes come.
REPLACEMENT = "\ufffd"

# A character has at most 4 bytes, so at most 3 are waiting for more, each shown as a U+FFFD by
# some decoders. One U+FFFD stands for at most 3 bytes: 12 more tokens, a byte each at least,
# settle everything before them.
MAX_PENDING = 3
SETTLED_AFTER = 12

# How many prompt tokens are decoded along: some decoders treat the first token of a text
# differently (sentencepiece drops its space).
CONTEXT_TOKENS = 6

# From this many undelivered tokens on (bytes that never form a character), look for a place to
# cut the window, so that no token is decoded again forever.
MAX_WINDOW = 32


class Decoder(Protocol):
    """The part of a tokenizer that is used."""

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """The text of one sequence of ids, spaces not cleaned up: a clean-up looks ahead, so text
        would change after it was delivered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one call added.

    text: new text, final. stop_reason: the stop string that ended the text, or None.
    num_tokens: output tokens that no later cut can remove: the fewest that cover the text so far.
        After a stop string these are the tokens kept; without stop strings, or after `finish`
        without a match, all.
    """

    text: str
    stop_reason: str | None
    num_tokens: int


class TextStream:
    """Incremental text of one output.

    Args:
        tokenizer: decodes ids; only `decode` is called.
        prompt_token_ids: the prompt; its last tokens are context for decoding, never output.
        stop: stop strings. The first to be complete wins; of several complete at the same
            character, the longest.
        skip_special_tokens: leave special tokens out of the text.
        min_tokens: a stop string complete before this many tokens is ordinary text.

    Source: the two-offset windows of text-generation-inference and vLLM; Knuth-Morris-Pratt
    (1977) for the stop strings.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        *,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        assert not isinstance(stop, str), "stop is a sequence of strings"
        self._window = _Window(tokenizer, prompt_token_ids, skip_special_tokens)
        self._stops = [_StopString(text) for text in stop]
        self._first_characters = frozenset(text[0] for text in stop)
        self._min_tokens = min_tokens
        self._marks: list[_Mark] = [_Mark(0, 0)]  # one per token prefix, the empty one first
        self._held = ""  # settled text that may begin a stop string
        self._tail = ""  # the last delivered characters
        self._num_settled = 0  # characters, `_held` included
        self._stop_reason: str | None = None
        self._num_certain = 0
        self._finished = False

    @property
    def holds_back(self) -> bool:
        """Whether a stop string may still cut tokens that were put."""
        return self._stop_reason is None and self._num_certain < len(self._marks) - 1

    def put(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the next output tokens. After a stop they are ignored."""
        assert not self._finished, "put() after finish()"
        text = ""
        for token in token_ids:
            if self._stop_reason is not None:
                break
            piece, pending = self._window.push(token)
            self._marks.append(_Mark(self._num_settled + len(piece), pending))
            text += self._take(piece)
        return self._delta(text)

    def finish(self) -> TextDelta:
        """Deliver everything held back; an unfinished character becomes U+FFFD."""
        text = ""
        if not self._finished and self._stop_reason is None:
            text = self._take(self._window.flush())
            if self._stop_reason is None:
                text += self._release(0)
                self._num_certain = len(self._marks) - 1
        self._finished = True
        return self._delta(text)

    def _delta(self, text: str) -> TextDelta:
        count = len(self._marks) - 1
        if not self._stops:
            self._num_certain = count
        while self._num_certain < count and not self._covers_text(self._num_certain):
            self._num_certain += 1
        return TextDelta(text=text, stop_reason=self._stop_reason, num_tokens=self._num_certain)

    def _covers_text(self, count: int) -> bool:
        """Whether the first `count` tokens decode to something that starts with the delivered
        text."""
        mark = self._marks[count]
        beyond = self._num_settled - len(self._held) - mark.num_settled
        # Tokens that end in undecided bytes decode to U+FFFD there: that covers the text only if
        # the bytes did turn out to be invalid.
        ended = self._tail[len(self._tail) - beyond :] if beyond > 0 else ""
        return beyond <= mark.num_pending and ended == REPLACEMENT * beyond

    def _take(self, piece: str) -> str:
        """Add settled text, look for stop strings, return what is safe to deliver."""
        # Nothing held means that no stop string is partly matched.
        if not self._held and self._first_characters.isdisjoint(piece):
            self._num_settled += len(piece)
            self._tail = (self._tail + piece)[-MAX_PENDING:]
            return piece
        armed = len(self._marks) - 1 >= self._min_tokens
        for place, character in enumerate(piece, start=1):
            complete = [stop.text for stop in self._stops if stop.push(character)]
            if complete and armed:
                return self._cut(piece[:place], max(complete, key=len))
        self._held += piece
        self._num_settled += len(piece)
        return self._release(max(stop.matched for stop in self._stops))

    def _release(self, keep: int) -> str:
        """All but the last `keep` characters of the held text."""
        split = len(self._held) - keep
        text, self._held = self._held[:split], self._held[split:]
        self._tail = (self._tail + text)[-MAX_PENDING:]
        return text

    def _cut(self, piece: str, stop: str) -> str:
        """End the text before `stop`, which `piece` completes."""
        self._held += piece
        self._num_settled += len(piece)
        self._stop_reason = stop
        return self._release(len(stop))


class _Mark(NamedTuple):
    """A prefix of the tokens: its settled characters, and how many U+FFFD follow them."""

    num_settled: int
    num_pending: int


class _Window:
    """Decodes a short run of tokens: some whose text is delivered, as context, then new ones.

    A decoder is not a sum over tokens, but it is one over runs that end between characters: the
    new text is what the run's text has beyond the context's.
    """

    def __init__(
        self, tokenizer: Decoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        self._text = self._decode(self._ids)
        if self._text.endswith(REPLACEMENT):
            # Output bytes must not complete a character of the prompt.
            self._ids, self._text = [], ""
        self._num_context = len(self._ids)
        self._sent = self._text  # the part of `_text` that is delivered

    def push(self, token: int) -> tuple[str, int]:
        """Add a token.

        Returns:
            The text that became certain, and the number of U+FFFD that follow it for now.
        """
        self._ids.append(token)
        self._text = self._decode(self._ids)
        new = self._text[len(self._sent) :]
        pending = min(_num_trailing(self._text), len(new))
        if pending and not self._text.startswith(self._sent):
            # A byte-fallback decoder spoils a whole run of bytes, delivered ones too, until the
            # last character of the run is complete. Past reason, take it as it is.
            new, pending = ("" if len(self._ids) < 8 * MAX_WINDOW else new), 0
        piece = new[: len(new) - pending]
        self._sent += piece
        if piece and not pending:
            self._drop_context()
        elif len(self._ids) - self._num_context >= MAX_WINDOW:
            self._shorten()
        return piece, pending

    def flush(self) -> str:
        """What is left."""
        text = self._text[len(self._sent) :]
        self._sent = self._text
        return text

    def _drop_context(self) -> None:
        """The tokens just delivered are the context of the next ones."""
        if self._num_context:
            del self._ids[: self._num_context]
            self._text = self._decode(self._ids)
        self._num_context = len(self._ids)
        self._sent = self._text

    def _shorten(self) -> None:
        """Cut a long window without a clean end, if its two parts decode independently."""
        head, tail = self._decode(self._ids[:-SETTLED_AFTER]), self._ids[-SETTLED_AFTER:]
        text = self._decode(tail)
        if head + text == self._text and len(head) <= len(self._sent):
            self._sent = text[: len(self._sent) - len(head)]
            self._ids, self._text, self._num_context = tail, text, 0

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


class _StopString:
    """One stop string against a stream of characters, O(1) amortised each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the stream ends with, fewer than all
        # back[i]: longest proper prefix of text[:i] that is also its suffix.
        self._back = [0, 0]
        for character in text[1:]:
            self._back.append(self._next(self._back[-1], character))

    def push(self, character: str) -> bool:
        """Take a character; true if it completes the string."""
        self.matched = self._next(self.matched, character)
        if self.matched < len(self.text):
            return False
        self.matched = self._back[self.matched]
        return True

    def _next(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self._back[matched]
        return matched + (self.text[matched] == character)


def _num_trailing(text: str) -> int:
    """How many U+FFFD end `text`, at most MAX_PENDING."""
    count = 0
    while count < MAX_PENDING and text.endswith(REPLACEMENT, 0, len(text) - count):
        count += 1
    return count
