# SPDX-License-Identifier: Apache-2.0
"""Text sources of the demo model and their splits: GSM8K, gsm_symbolic, a corpus of Python
packages.

Every split is a function of the text alone (hashes, never random state), so preparing the data
twice
gives the same documents. Problems are dicts with ``question`` and ``answer``.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path

from specla.errors import ConfigError

SYMBOLIC, PYTHON = "gsm_symbolic_40k.jsonl.xz", "corpus.txt.xz"
GSM8K_TRAIN, GSM8K_TEST = "train.jsonl", "test.jsonl"
OVERLAP = "gsm8k_test_indices_overlapping.json"

Problem = dict[str, str]
Skeleton = frozenset[tuple[str, str]]

HELD_OUT_TEMPLATES = 8
NEW_NUMBERS_PERCENT = 4


def digest(text: str) -> int:
    """A stable 32-bit hash of a text."""
    return int.from_bytes(hashlib.blake2s(text.encode(), digest_size=4).digest(), "little")


def locate(folder: Path, name: str) -> Path:
    """The one file or folder of that name in or below a folder of data.

    Raises:
        ConfigError: there is none, or there are several.
    """
    found = [folder / name] if (folder / name).exists() else sorted(folder.rglob(name))
    if len(found) != 1:
        what = "has none" if not found else f"has {', '.join(map(str, found))}"
        raise ConfigError(f"a folder of data must have one {name} in or below it; {folder} {what}")
    return found[0]


def read_problems(path: Path) -> list[Problem]:
    """All problems of a ``.jsonl`` or ``.jsonl.xz`` file, calculator marks ``<<...>>``
    stripped."""
    raw = path.read_bytes()
    text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    return [{"question": r["question"].strip(), "answer": strip_marks(r["answer"])} for r in rows]


def strip_marks(answer: str) -> str:
    """GSM8K's answer without its calculator annotations."""
    return re.sub(r"<<[^>]*>>", "", answer).strip()


# --- gsm_symbolic: templates -------------------------------------------------------------------


def skeleton(question: str) -> Skeleton:
    """Word pairs of a question with numbers masked and capitalised words (names) left out."""
    text = re.sub(r"\$?\d[\d,./]*", "#", question)
    words = [w for w in re.findall(r"[A-Za-z']+|#", text) if not w[0].isupper()]
    return frozenset(itertools.pairwise(words))


def jaccard(a: Skeleton, b: Skeleton) -> float:
    """Shared fraction of two sets."""
    return len(a & b) / max(1, len(a | b))


def cluster_templates(problems: list[Problem], threshold: float = 0.3) -> list[int]:
    """The template index of each problem: greedy clustering of skeletons around first members."""
    centres: list[Skeleton] = []
    known: dict[Skeleton, int] = {}
    for problem in problems:
        key = skeleton(problem["question"])
        if key not in known:
            scores = [jaccard(key, centre) for centre in centres]
            best = max(range(len(scores)), key=scores.__getitem__, default=-1)
            if best < 0 or scores[best] < threshold:
                centres.append(key)
                best = len(centres) - 1
            known[key] = best
    return [known[skeleton(p["question"])] for p in problems]


def isolated_templates(
    problems: list[Problem], labels: list[int], margin: float = 0.15
) -> list[int]:
    """Templates with many members whose nearest other template is far: holding them out is
    honest."""
    members: dict[int, list[Skeleton]] = {}
    for problem, label in zip(problems, labels, strict=True):
        members.setdefault(label, []).append(skeleton(problem["question"]))
    first = {label: keys[0] for label, keys in members.items()}
    far = []
    for label, keys in members.items():
        others = (jaccard(first[label], c) for other, c in first.items() if other != label)
        if len(keys) >= 300 and max(others) < margin:
            far.append(label)
    return far


def split_symbolic(problems: list[Problem]) -> dict[str, list[Problem]]:
    """gsm_symbolic as ``train``, ``new_numbers`` (known templates) and ``new_templates``."""
    labels = cluster_templates(problems)
    first: dict[int, str] = {}
    for problem, label in zip(problems, labels, strict=True):
        first.setdefault(label, problem["question"])
    far = sorted(isolated_templates(problems, labels), key=lambda label: digest(first[label]))
    held_out = set(far[:HELD_OUT_TEMPLATES])
    parts: dict[str, list[Problem]] = {"train": [], "new_numbers": [], "new_templates": []}
    for problem, label in zip(problems, labels, strict=True):
        if label in held_out:
            parts["new_templates"].append(problem)
        elif digest(problem["question"]) % 100 < NEW_NUMBERS_PERCENT:
            parts["new_numbers"].append(problem)
        else:
            parts["train"].append(problem)
    return parts


def gsm8k_test(folder: Path) -> list[Problem]:
    """GSM8K's test problems without those that gsm_symbolic's templates were made from."""
    overlap = set(json.loads(locate(folder, OVERLAP).read_text()))
    rows = read_problems(locate(folder, GSM8K_TEST))
    return [row for i, row in enumerate(rows) if i not in overlap]


# --- Python ------------------------------------------------------------------------------------


def read_python(path: Path) -> Iterator[tuple[str, str]]:
    """(path in package, source) of every file of the corpus."""
    with lzma.open(path, "rt", encoding="utf-8", errors="replace", newline="") as stream:
        text = stream.read()
    for part in text.split("<|file|>")[1:]:
        name, _, source = part.partition("\n")
        yield name, source


def strip_header(source: str) -> str:
    """A source without its leading comment block (licence and copyright notices)."""
    lines = source.lstrip("\ufeff").split("\n")
    start = 0
    while start < len(lines) and (not lines[start].strip() or lines[start].startswith("#")):
        start += 1
    return "\n".join(lines[start:])


def is_prose_like(source: str) -> bool:
    """Whether a file reads as written code: no tables of data, no generated walls of text."""
    if not 200 <= len(source) <= 200_000:
        return False
    lines = source.split("\n")
    digits = len(re.findall(r"[0-9]", source))
    ascii_share = len(source.encode("ascii", "ignore")) / len(source)
    longest = max(map(len, lines))
    return longest < 400 and digits < 0.12 * len(source) and ascii_share > 0.97


def python_documents(path: Path, limit: int | None = None) -> dict[str, list[str]]:
    """The corpus as ``train`` and ``held_out`` sources; whole packages and single files held
    out."""
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    seen: set[int] = set()
    for name, raw in itertools.islice(read_python(path), limit):
        source = strip_header(raw.replace("\r\n", "\n")).rstrip() + "\n"
        key = digest("".join(source.split()))
        if key in seen or not is_prose_like(source):
            continue
        seen.add(key)
        package = name.split("/")[0]
        held = digest(package) % 100 == 7 or digest(name) % 400 == 7
        parts["held_out" if held else "train"].append(source)
    return parts
