# SPDX-License-Identifier: Apache-2.0
"""Turns the text sources into token pools and an evaluation set, on all processor cores.

``python -m specla.train.prepare --data DIR --out DIR`` writes NAME.npy per pool (see `packing`),
``heldout.json``, and ``pools.json`` with the size of each pool. DIR holds, in any folders, GSM8K's
train.jsonl and test.jsonl, gsm_symbolic_40k.jsonl.xz, gsm8k_test_indices_overlapping.json and
corpus.txt.xz. With ``--vocab-size`` the tokenizer is trained first, on the same texts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tokenizers import Tokenizer

from specla.train import corpus, functions, mining, problems, talk
from specla.train.chat import (
    ASSISTANT_ID,
    DOCUMENT_END,
    END,
    SPECIAL_TOKENS,
    USER_ID,
    render,
)  # fmt: skip
from specla.train.packing import LIGHT_BIT, START_BIT
from specla.train.tokenizer import sample, save_tokenizer, train_tokenizer

PIECE = 1024
Given = Annotated[Path, typer.Option()]
WORKER: dict[str, Tokenizer] = {}
BATCH = 4000
Job = tuple[Callable[..., dict[str, np.ndarray]], tuple[Any, ...], str]


def start_worker(path: str) -> None:
    """Loads the tokenizer once in each worker process."""
    WORKER["tokenizer"] = Tokenizer.from_file(path)


def encode(documents: Iterable[str], seed: int, bos: float) -> np.ndarray:
    """Documents as one pool array: some after an opening ``<|endoftext|>``, plain ones closed by
    it."""
    rng, rows = random.Random(seed), []
    texts = [d if d.endswith(END) else d + DOCUMENT_END for d in documents]
    texts = [DOCUMENT_END + t if rng.random() < bos else t for t in texts]
    for text in texts:  # one at a time: every core already runs a worker
        encoding = WORKER["tokenizer"].encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        light = np.cumsum(ids == USER_ID) > np.cumsum(ids == ASSISTANT_ID)
        ids |= np.where(light, LIGHT_BIT, 0).astype(np.uint32)
        ids[::PIECE] |= START_BIT
        rows.append(ids)
    return np.concatenate(rows) if rows else np.zeros(0, np.uint32)


def encode_problems(rows: list[corpus.Problem], seed: int) -> dict[str, np.ndarray]:
    """Worked problems in their presentations."""
    rng = random.Random(seed)
    return {"": encode((talk.present(row, rng) for row in rows), seed, 0.1)}


def encode_generated(first: int) -> dict[str, np.ndarray]:
    """Generated word problems, sums, small functions and chats of one range of seeds."""
    rng, seeds = random.Random(first), range(first, first + BATCH)
    words = list(problems.word_problems(seeds))
    several = words[:: max(1, len(words) // 250)]
    sums = [problems.arithmetic(s) for s in seeds[: BATCH // 3]]
    asked = (functions.generated_function(rng) for _ in range(BATCH // 4))
    return {
        "generated": encode([talk.present(p, rng) for p in words], first, 0.1),
        "arithmetic": encode([render(p["question"], p["answer"]) for p in sums], first, 0.1),
        "functions": encode(
            [functions.ask(f, rng) for f in asked if not functions.is_held_out(f)], first, 0.1
        ),
        "talk": encode(
            [talk.conversation(p, rng) for p in several]
            + [talk.small_talk(rng) for _ in range(100)],
            first, 0.1,
        ),
    }  # fmt: skip


def encode_python(sources: list[str], seed: int) -> dict[str, np.ndarray]:
    """Whole files, and requests for the short functions mined from them."""
    rng = random.Random(seed)
    sources = [s for s in sources if not any(token in s for token in SPECIAL_TOKENS)]
    found = [f for source in sources for f in mining.mine_functions(source)]
    return {
        "python": encode(sources, seed, 0.5),
        "mined": encode([functions.ask(f, rng) for f in found], seed, 0.1),
    }


def run(job: Job) -> dict[str, np.ndarray]:
    """One job in a worker; an unnamed result takes the job's name."""
    function, arguments, name = job
    return {key or name: value for key, value in function(*arguments).items()}


def batches(rows: list[Any], size: int) -> list[list[Any]]:
    """Consecutive slices."""
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def first_500(rows: list[corpus.Problem]) -> list[corpus.Problem]:
    """At most 500 problems, in the order of their hashes."""
    return sorted(rows, key=lambda r: corpus.digest(r["question"]))[:500]


def held_out_sets(
    folder: Path, symbolic: dict[str, list[corpus.Problem]], python: list[str]
) -> dict[str, list[Any]]:
    """Evaluation texts of every domain, at most 500 problems each; a function of the data
    alone."""
    words = list(problems.word_problems(range(10**9, 10**9 + 25_000), held_out=True))
    rng = random.Random(7)
    asked: dict[str, dict[str, Any]] = {}
    while len(asked) < 200:
        function = functions.generated_function(rng)
        if functions.is_held_out(function):
            asked[function.does] = function._asdict()
    files = sorted(python, key=corpus.digest)[:80]
    mined = [f._asdict() for source in python for f in mining.mine_functions(source)]
    return {
        "symbolic_new_numbers": first_500(symbolic["new_numbers"]),
        "symbolic_new_templates": first_500(symbolic["new_templates"]),
        "gsm8k_test": first_500(corpus.gsm8k_test(folder)),
        "generated": first_500(words),
        "functions": list(asked.values()),
        "mined": sorted(mined, key=lambda f: corpus.digest(f["does"]))[:200],
        "python": [text[:20_000] for text in files],
    }


def main(data: Given, out: Given, tokenizer: Given, generated: int = 1_000_000, workers: int = 0,
         files: int | None = None, vocab_size: int = 0) -> None:  # fmt: skip
    """Writes all pools. ``--generated`` counts word problems, ``--files`` limits Python for
    trials; ``--tokenizer`` is tokenizer.json, trained here if ``--vocab-size`` says how large."""
    began = time.time()
    out.mkdir(parents=True, exist_ok=True)
    symbolic = corpus.split_symbolic(corpus.read_problems(corpus.locate(data, corpus.SYMBOLIC)))
    python = corpus.python_documents(corpus.locate(data, corpus.PYTHON), files)
    rows = {
        "symbolic": symbolic["train"],
        "gsm8k": corpus.read_problems(corpus.locate(data, corpus.GSM8K_TRAIN)),
    }
    context = multiprocessing.get_context("fork")
    if vocab_size:
        # In a process of its own: its threads must not be there when others are forked.
        learned = (sample(rows["gsm8k"], rows["symbolic"], python["train"]), vocab_size)
        process = context.Process(target=train_beside, args=(*learned, tokenizer.parent))
        process.start()
        process.join()
    with context.Pool(workers or os.cpu_count(), start_worker, (str(tokenizer),)) as pool:
        jobs: list[Job] = [(encode_generated, (i,), "") for i in range(0, generated, BATCH)]
        early = pool.map_async(run, jobs, chunksize=1)
        jobs = [
            (encode_python, (part, i), "") for i, part in enumerate(batches(python["train"], 100))
        ]
        jobs += [(encode_problems, (part, i), name) for name, group in rows.items()
                 for i, part in enumerate(batches(group, 2000))]  # fmt: skip
        late = pool.map_async(run, jobs, chunksize=1)
        held = held_out_sets(data, symbolic, python["held_out"])
        (out / "heldout.json").write_text(json.dumps(held))
        write_pools(out, early.get() + late.get())
    typer.echo(f"prepared in {time.time() - began:.0f} s")


def train_beside(texts: list[str], vocab_size: int, folder: Path) -> None:
    """The tokenizer, into a folder."""
    save_tokenizer(train_tokenizer(texts, vocab_size), folder)


def write_pools(out: Path, results: list[dict[str, np.ndarray]]) -> None:
    """Joins the jobs' arrays by pool and writes them with a summary."""
    sizes = {}
    for name in sorted({name for result in results for name in result}):
        joined = np.concatenate([r[name] for r in results if name in r])
        np.save(out / f"{name}.npy", joined)
        sizes[name] = {"tokens": len(joined), "documents": int(((joined & START_BIT) != 0).sum())}
        typer.echo(
            f"{name:12s} {sizes[name]['tokens']:>12,} tokens {sizes[name]['documents']:>10,} "
            f"documents"
        )
    (out / "pools.json").write_text(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    typer.run(main)
