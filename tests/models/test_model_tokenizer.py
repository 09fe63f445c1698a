# SPDX-License-Identifier: Apache-2.0
"""Tier: exact. Tokenizers and chat templates of a checkpoint, honest and hostile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specla.errors import InvalidCheckpoint, RequestRejected
from specla.models.tokenizer import Tokenizer, load_tokenizer
from specla.models.toy import write_toy_checkpoint

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def edited(tmp_path: Path, drop: str | None = None, **fields: Any) -> Path:
    folder = write_toy_checkpoint(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    values = {**json.loads(path.read_text()), **fields}
    values.pop(drop, None)
    path.write_text(json.dumps(values))
    return folder


@given(text=st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_spaces_before_punctuation_stay(tokenizer: Tokenizer) -> None:
    text = "a , b . c ' s  \n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_it_declares(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 320
    assert tokenizer.eos_token_ids == (4,)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.has_chat_template


def test_special_tokens_are_skipped_on_request(tokenizer: Tokenizer) -> None:
    ids = [0, *tokenizer.encode("x", add_special_tokens=False), 4]
    assert tokenizer.decode(ids) == "x"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>x<|end|>"


def test_chat_gets_no_second_begin_token(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat(HELLO)
    assert text == "<|bos|><|user|>hello<|end|><|assistant|>"
    ids = tokenizer.apply_chat_template(HELLO)
    assert ids.count(0) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("hello")[0] == 0
    closed = tokenizer.apply_chat_template(HELLO, add_generation_prompt=False)
    assert closed == ids[:-1]


@pytest.mark.parametrize("text", ["\ud800", "fine \udcff", "\udfff\ud800"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestRejected, match="valid Unicode") as caught:
        tokenizer.encode(text)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestRejected, match="valid Unicode"):
        tokenizer.apply_chat_template([{"role": "user", "content": text}])


def test_short_runs_are_decoded_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without special tokens apart; a long run is not kept."""
    decoded: list[tuple[int, ...]] = []
    decode = tokenizer._backend.decode

    def watched(ids: list[int], **options: object) -> str:
        decoded.append(tuple(ids))
        return str(decode(ids, **options))

    monkeypatch.setattr(tokenizer._backend, "decode", watched)
    ids = tokenizer.encode("not said before")
    wanted = [ids[-2:], ids[-2:], ids[-1:], ids * 2, ids * 2, ids[-2:]]
    texts = [tokenizer.decode(one) for one in wanted]
    assert decoded == [tuple(one) for one in (ids[-2:], ids[-1:], ids * 2, ids * 2)]
    assert texts[0] == texts[1] == texts[5] != texts[2]
    special = [tokenizer.eos_token_ids[0], ids[-1]]
    assert tokenizer.decode(special) != tokenizer.decode(special, skip_special_tokens=False)


@pytest.mark.parametrize("token", [-1, 320, 1 << 31, 1 << 63])
def test_ids_outside_the_vocabulary_are_no_text(tokenizer: Tokenizer, token: int) -> None:
    assert tokenizer.decode([5, token]) == tokenizer.decode([5])


@pytest.mark.parametrize(
    "messages",
    [[], "hi", None, [None], ["hi"], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}],
     [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text"}]}]],
)  # fmt: skip
def test_malformed_messages(tokenizer: Tokenizer, messages: Any) -> None:
    with pytest.raises(RequestRejected, match="messages") as caught:
        tokenizer.apply_chat_template(messages)
    assert caught.value.param == "messages"


def test_no_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(edited(tmp_path, drop="chat_template"))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidCheckpoint, match="this one has none"):
        tokenizer.apply_chat_template(HELLO)


def test_template_may_refuse_a_request(tmp_path: Path) -> None:
    template = "{{ raise_exception('no user turns, please') }}"
    tokenizer = load_tokenizer(edited(tmp_path, chat_template=template))
    with pytest.raises(RequestRejected, match="no user turns, please"):
        tokenizer.apply_chat_template(HELLO)


BROKEN = "{% for %}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"


@pytest.mark.parametrize("template", BROKEN)
def test_broken_template(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(edited(tmp_path, chat_template=template))
    with pytest.raises(InvalidCheckpoint, match="chat template must render"):
        tokenizer.apply_chat_template(HELLO)


ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARKER', 'w') }}",
    "{{ '{0.__class__.__mro__}'.format(messages).__class__.__mro__ }}",
    "{{ messages.append(1) }}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_templates_cannot_leave_the_sandbox(tmp_path: Path, template: str) -> None:
    marker = tmp_path / "escaped"
    template = template.replace("MARKER", str(marker))
    tokenizer = load_tokenizer(edited(tmp_path, chat_template=template))
    with pytest.raises(InvalidCheckpoint, match="may not leave its sandbox"):
        tokenizer.apply_chat_template(HELLO)
    assert not marker.exists()


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["trap.T", "trap.T"]}, ["trap.T", None]])
def test_tokenizer_code_in_a_repository_is_never_run(tmp_path: Path, auto_map: Any) -> None:
    folder, marker = edited(tmp_path, auto_map=auto_map), tmp_path / "code-was-run"
    (folder / "trap.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
    with pytest.raises(InvalidCheckpoint, match="never runs"):
        load_tokenizer(folder)
    assert not marker.exists()


def test_model_code_in_a_repository_is_never_run(tmp_path: Path) -> None:
    folder, marker = edited(tmp_path), tmp_path / "code-was-run"
    (folder / "trap.py").write_text(f"open({str(marker)!r}, 'w')\nclass C: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "trap.C", "AutoTokenizer": ["trap.C", "trap.C"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).encode("x")
    assert not marker.exists()


def test_damaged_and_missing_tokenizers(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match="must hold a tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidCheckpoint, match="must hold a tokenizer"):
        load_tokenizer(folder)


def test_transformers_is_imported_late_and_loads_quietly(folder: Path) -> None:
    script = (
        "import sys; import specla, specla.models.tokenizer as t; from pathlib import Path; "
        "assert 'transformers' not in sys.modules; "
        f"t.load_tokenizer(Path({str(folder)!r})).encode('x')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
