# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE of the trained models: lossless on any Unicode text, digits split one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specla.train.chat import CHAT_TEMPLATE, DOCUMENT_END, END, SPECIAL_TOKENS

VOCAB_SIZE = 8192
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A BPE of ``vocab_size`` entries; ids 0-4 are the special tokens of the chat format."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json (with the chat template), special_tokens_map.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": DOCUMENT_END, "eos_token": END, "pad_token": DOCUMENT_END}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:4]),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)
    special = {**names, "additional_special_tokens": list(SPECIAL_TOKENS[1:4])}
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, value: object) -> None:
    """Readable, stable JSON with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(
    data: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    vocab_size: int = VOCAB_SIZE,
) -> None:
    """Trains the tokenizer on GSM8K and gsm_symbolic training text and a slice of the corpus."""
    from specla.train import corpus

    problems = corpus.read_problems(corpus.locate(data, corpus.SYMBOLIC))
    symbolic = corpus.split_symbolic(problems)
    train = corpus.read_problems(corpus.locate(data, corpus.GSM8K_TRAIN))
    sources = corpus.python_documents(corpus.locate(data, corpus.PYTHON))["train"]
    save_tokenizer(train_tokenizer(sample(train, symbolic["train"], sources), vocab_size), out)


def sample(
    gsm8k: list[dict[str, str]], symbolic: list[dict[str, str]], sources: list[str]
) -> list[str]:
    """What the entries are learned from."""
    worked = gsm8k * 2 + symbolic[::6]
    return [p["question"] + "\n" + p["answer"] for p in worked] + sources[::12]


if __name__ == "__main__":
    typer.run(main)
