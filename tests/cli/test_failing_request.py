# SPDX-License-Identifier: Apache-2.0
"""A request that leaves no token to draw: an error by name, and its neighbours' answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specla.cli import main
from specla.models.toy import TOKENIZER_SIZE, write_toy_checkpoint


def test_one_line_fails_and_the_rest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_toy_checkpoint(tmp_path / "toy")
    forbid_all = {"min_tokens": 3, "stop_token_ids": list(range(TOKENIZER_SIZE))}
    jobs = tmp_path / "jobs.jsonl"
    lines = [{"prompt": "a b a b"}, {"prompt": "c", "params": forbid_all}, {"prompt": "d"}]
    jobs.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--max-tokens", "4", "--ignore-eos", "--no-progress"]
    assert main(["generate", str(model), "--prompts", str(jobs), *flags]) == 1
    out = capsys.readouterr()
    first, failed, last = map(json.loads, out.out.splitlines())
    assert (len(first["token_ids"]), len(last["token_ids"])) == (4, 4)
    assert failed["error"]["type"] == "GenerationFailed"
    assert "min_tokens" in failed["error"]["message"]
    assert "Traceback" not in out.err
