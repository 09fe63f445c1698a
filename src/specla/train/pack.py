# SPDX-License-Identifier: Apache-2.0
"""The part of the data that the headline needs, small enough to travel.

``python -m specla.train.pack --data DIR --out DIR`` copies problems and suites, and packs a part
of the Python corpus again: whole files, drawn by the hashes of their names from all packages.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from pathlib import Path
from typing import Annotated

import typer

from specla.train import corpus

HUMANEVAL_FILE, MIXED_FOLDER = "HumanEval.jsonl.gz", "eagle_suite"
COPIED = (
    corpus.SYMBOLIC, corpus.GSM8K_TRAIN, corpus.GSM8K_TEST, corpus.OVERLAP, HUMANEVAL_FILE,
)  # fmt: skip


def data_digest(data: Path) -> str:
    """Tells folders of data apart, wherever they lie, by the sizes of the files that are read."""
    found = [(name, path) for name in (*COPIED, corpus.PYTHON) for path in data.rglob(name)]
    found += [(MIXED_FOLDER, path) for path in data.rglob(f"{MIXED_FOLDER}/*/*.jsonl")]
    sizes = sorted((name, path.stat().st_size) for name, path in found)
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:12]


def python_part(path: Path, limit: int) -> str:
    """Whole files of a corpus, about `limit` characters of them, in the corpus's own format."""
    files = sorted(corpus.read_python(path), key=lambda file: corpus.digest(file[0]))
    parts: list[str] = []
    for name, source in files:
        if limit <= 0:
            break
        parts.append(f"<|file|>{name}\n{source}")
        limit -= len(source)
    return "".join(parts)


def pack(data: Path, out: Path, characters: int) -> None:
    """Write `out`, every file in a folder of the name it had."""
    found = [corpus.locate(data, name) for name in COPIED]
    found += sorted(corpus.locate(data, MIXED_FOLDER).rglob("*.jsonl"))
    for file in found:
        target = out / file.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    source = corpus.locate(data, corpus.PYTHON)
    target = out / source.relative_to(data)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.compress(python_part(source, characters).encode(), preset=6))


def main(
    data: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    characters: int = 80_000_000,
) -> None:
    """Packs the data."""
    pack(data, out, characters)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    typer.echo(f"{out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
