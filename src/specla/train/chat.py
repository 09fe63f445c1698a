# SPDX-License-Identifier: Apache-2.0
"""The demo model's chat format: special tokens, their ids, and the Jinja template.

A turn is ``<|role|>text<|end|>`` with no white space of its own, so the text between two special
tokens is tokenised in isolation and an answer has the same tokens in training and in decoding.
"""

from __future__ import annotations

DOCUMENT_END, USER, ASSISTANT, SYSTEM, END = (
    "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")  # fmt: skip
SPECIAL_TOKENS = (DOCUMENT_END, USER, ASSISTANT, SYSTEM, END)
DOCUMENT_END_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID, END_ID = range(5)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('role must be system, user or assistant, got ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def render(question: str, answer: str | None = None) -> str:
    """One exchange as text; without an answer, the prompt that asks for one."""
    prompt = f"{USER}{question}{END}{ASSISTANT}"
    return prompt if answer is None else f"{prompt}{answer}{END}"
