# SPDX-License-Identifier: Apache-2.0
"""Short documented functions mined from Python sources with `ast`."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from specla.train.function import Function

LONGEST_BODY = 40


def mine_functions(source: str) -> Iterator[Function]:
    """Functions and methods of a file that have a one-sentence description and a short body."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.split("\n")
    for node in tree.body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef) and not member.decorator_list:
                found = mined(member, lines)
                if found:
                    yield found


def mined(node: ast.FunctionDef, lines: list[str]) -> Function | None:
    """One function or method, dedented; None if undocumented, long, or laid out unusually."""
    does = described(ast.get_docstring(node) or "")
    rest, indent = node.body[1:], node.col_offset
    if not does or not rest or rest[0].col_offset != indent + 4 or node.name.startswith("__"):
        return None
    body = [line.rstrip() for line in lines[node.body[0].end_lineno : node.end_lineno]]
    if any(line and not line.startswith(" " * indent) for line in body):
        return None
    body = [line[indent:] for line in body]
    while body and not body[0].strip():
        body.pop(0)
    if not 1 <= len(body) <= LONGEST_BODY or max(map(len, body)) > 110:
        return None
    signature = f"{node.name}({ast.unparse(node.args)})"
    if node.returns is not None:
        signature += f" -> {ast.unparse(node.returns)}"
    if len(signature) > 160:
        return None
    return Function(node.name, signature, does, "\n".join(body) + "\n")


def described(docstring: str) -> str | None:
    """The docstring's first sentence, lower-cased at its start, if it reads like a description."""
    first = re.split(r"\n\s*\n|\n\s*[:@>]|\n\s*(?:Args|Parameters|Returns)", docstring.strip())[0]
    first = re.split(r"(?<=[a-z)])\.(?:\s|$)", " ".join(first.split()))[0].rstrip(".: ")
    words = first.split()
    if not 3 <= len(words) <= 28 or not first.isascii() or not words[0].isalpha():
        return None
    if any(mark in first for mark in ("<|", "```", '"""', "\\", "::")):
        return None
    return first if words[0].isupper() and len(words[0]) > 1 else first[0].lower() + first[1:]
