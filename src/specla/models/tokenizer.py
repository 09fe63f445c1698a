# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, and chat templates, through transformers and without remote code.

Plain prompts are encoded as the tokenizer does by default (with its begin-of-text token, if it
adds one). A chat template writes its own special tokens, so its output gets no second one.
Templates come with the checkpoint and are not trusted: transformers renders them in Jinja's
immutable sandbox, and whatever they raise becomes a specla error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from specla.errors import InvalidCheckpoint, RequestRejected
from specla.models.files import eos_token_ids, read_json_object

Message = Mapping[str, Any]
SHORT, KEPT = 4, 1 << 16
"""Tokens of a run that is decoded once, and how many such runs are remembered. Incremental text
decodes two short runs per token, most of them again and again."""
# Errors a template's expressions can raise besides Jinja's own, for example by 1 / 0.
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        vocab_size: number of ids it knows, added tokens included; ids are below it.
        eos_token_ids: end tokens by generation_config.json, config.json or, where neither names
            one, the tokenizer itself.
        special_ids: every id that stands for a special token, not for text.
        has_chat_template: whether `apply_chat_template` can be used.
    """

    def __init__(self, backend: Any, eos: tuple[int, ...]) -> None:
        self._backend = backend
        own = backend.eos_token_id
        self.eos_token_ids = eos or (() if own is None else (int(own),))
        self.vocab_size = max(backend.get_vocab().values()) + 1
        self.special_ids = frozenset(int(i) for i in backend.all_special_ids)
        self.has_chat_template = bool(backend.chat_template)
        self._decode_short = lru_cache(KEPT)(self._decode)

    @property
    def digest(self) -> str:
        """Hex sha256 of all tokens and their ids: what a drafter was trained with."""
        pairs = sorted(self._backend.get_vocab().items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    @property
    def bos_token_id(self) -> int | None:
        """Begin-of-text token, if there is one."""
        token = self._backend.bos_token_id
        return None if token is None else int(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`.

        Raises:
            RequestRejected: the text holds a lone surrogate, so it is not valid Unicode.
        """
        _check_unicode(text, "prompt")
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`, spaces untouched; incomplete UTF-8 shows as U+FFFD.

        An id the tokenizer does not know is no text: a model's vocabulary may be padded beyond
        its tokenizer's, and a token drawn from the padding must not end a request.
        """
        decode = self._decode_short if len(ids) <= SHORT else self._decode
        return decode(tuple(ids), skip_special_tokens)

    def _decode(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        text = self._backend.decode(
            [i for i in ids if 0 <= i < self.vocab_size],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, ready for the model's answer.

        Args:
            messages: non-empty; each has string entries `role` and `content`.
            add_generation_prompt: end with the opening of an assistant's turn.

        Raises:
            RequestRejected: malformed messages, or the template refuses them.
            InvalidCheckpoint: no template, or one that is broken or tries to leave the sandbox.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text; see `apply_chat_template`."""
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidCheckpoint(
                "chat needs a checkpoint with a chat template, this one has none; "
                "use a plain prompt, or add chat_template.jinja to its folder"
            )
        _check_messages(messages)
        try:
            text = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            raise _template_failure(error) from error
        return str(text)


def _template_failure(error: Exception) -> Exception:
    """The template's own `raise_exception` judges the request; anything else is its defect."""
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError, UndefinedError

    reason = " ".join(str(error).split())[:300]
    if type(error) is TemplateError or isinstance(error, UndefinedError):
        return RequestRejected(
            f"messages must suit the model's chat template, which says: {reason}",
            param="messages",
        )
    what = "may not leave its sandbox" if isinstance(error, SecurityError) else "must render"
    return InvalidCheckpoint(
        f"a chat template {what}, but this checkpoint's fails ({type(error).__name__}: "
        f"{reason}); use a plain prompt, or replace the template"
    )


def _check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, list | tuple) or not messages:
        raise RequestRejected(
            "messages must be a non-empty list of {'role': ..., 'content': ...}", param="messages"
        )
    for at, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise RequestRejected(
                    f"messages[{at}].{key} must be a string, got {type(value).__name__}",
                    param="messages",
                )
            _check_unicode(value, "messages")


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestRejected(
            f"{param} must be valid Unicode text, got a lone surrogate or invalid UTF-8 at "
            f"character {error.start}; send UTF-8",
            param=param,
        ) from error


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in a checkpoint's folder. Never runs the folder's code or the network.

    Raises:
        InvalidCheckpoint: there is none, it is damaged, or it needs code from the checkpoint.
    """
    _refuse_remote_code(folder)
    # Imported here: transformers takes seconds to import.
    from transformers import AutoTokenizer, PreTrainedConfig

    try:
        # An empty config keeps transformers from interpreting config.json, whose model type it
        # need not know and whose auto_map it must not follow.
        backend = AutoTokenizer.from_pretrained(
            str(folder),
            config=PreTrainedConfig(),
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # the libraries raise bare Exception on damaged files
        reason = " ".join(str(error).split())[:300]
        raise InvalidCheckpoint(
            f"{folder} must hold a tokenizer that transformers can load ({reason}); "
            "save the tokenizer beside the weights, as tokenizer.json and tokenizer_config.json"
        ) from error
    return Tokenizer(backend, eos_token_ids(folder))


def _refuse_remote_code(folder: Path) -> None:
    """A tokenizer class defined in the checkpoint cannot be had without running its code."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return
    auto_map = read_json_object(path).get("auto_map")
    if auto_map:
        raise InvalidCheckpoint(
            f"{path} must name a tokenizer class of transformers, but asks for code from the "
            f"checkpoint (auto_map {str(auto_map)[:120]}), which specla never runs; convert the "
            "tokenizer to tokenizer.json"
        )
