# SPDX-License-Identifier: Apache-2.0
"""Tier: exact. Names to folders: what wins, what is refused, and how fast when offline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specla.errors import ConfigError, ModelNotFound, SpeclaError
from specla.models.resolve import DOWNLOAD_PATTERNS, resolve

COMMIT = "0" * 40


def fails(name: str, kind: type[SpeclaError] = ModelNotFound, **options: str) -> str:
    with pytest.raises(kind) as caught:
        resolve(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def test_demo_is_part_of_the_package() -> None:
    assert (resolve("demo") / "config.json").is_file()


def test_local_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path


def test_local_directory_wins_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/name").mkdir(parents=True)
    Path("org/name/config.json").write_text("{}")
    assert resolve("org/name") == Path("org/name")


def test_directory_without_a_config(tmp_path: Path) -> None:
    assert str(tmp_path / "config.json") in fails(str(tmp_path))


@pytest.mark.parametrize("name", ["", " ", "a\0b", "a\nb", "\udcff"])
def test_unusable_names(name: str) -> None:
    assert "must be 'demo', a directory or a hub id" in fails(name)


@pytest.mark.parametrize(
    "name", ["absent", "../../absent", "a/b/c", "a b/c", "~nobody-here/x", "x" * 5000, "a/.."]
)
def test_neither_directory_nor_hub_id(name: str) -> None:
    message = fails(name)
    assert "as a directory: " in message
    assert "as a hub id: not of the form org/name" in message


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "it is not a directory" in fails(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("revision", ["../../x", "a b", "", "-x"])
def test_unusable_revisions(revision: str) -> None:
    assert "must be a branch, tag or commit" in fails(f"org/name@{revision}")


def test_revision_must_mean_something(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "leave out revision='v1'" in fails(str(tmp_path), ConfigError, revision="v1")
    assert "given once" in fails("org/name@v1", ConfigError, revision="v2")


def test_only_data_is_ever_downloaded() -> None:
    assert not [p for p in DOWNLOAD_PATTERNS if p.endswith((".py", ".bin", ".pt", ".pth", "*"))]


SCRIPT = """
import sys, time
from huggingface_hub import snapshot_download  # how long an import takes depends on the load
from specla.errors import SpeclaError
from specla.models.resolve import resolve
start = time.perf_counter()
try:
    print(resolve(sys.argv[1]))
except SpeclaError as error:
    print(error.exit_code, error)
print(time.perf_counter() - start)
"""


def offline(cache: Path, name: str) -> tuple[str, float]:
    """In its own process: the hub library reads the environment once, when imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name],
        env={"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    message, seconds = done.stdout.splitlines()
    return message, float(seconds)


def cached_snapshot(cache: Path, **files: str) -> Path:
    repo = cache / "hub/models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text(COMMIT)
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        (snapshot / name.replace("__", ".")).write_text(content)
    return snapshot


def test_offline_and_not_cached_fails_at_once(tmp_path: Path) -> None:
    message, seconds = offline(tmp_path, "org/name")
    assert message.startswith("3 model 'org/name' not found: as a directory: no such directory")
    assert "offline mode is on and config.json of org/name is not in the local cache" in message
    assert seconds < 2


def test_offline_and_cached_is_found(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path, config__json="{}", model__safetensors="")
    assert offline(tmp_path, "org/name")[0] == str(snapshot)
    assert offline(tmp_path, f"org/name@{COMMIT}")[0] == str(snapshot)


def test_offline_names_the_missing_file(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    snapshot = cached_snapshot(tmp_path, config__json="{}", model__safetensors__index__json=index)
    (snapshot / "model-1.safetensors").touch()
    message, seconds = offline(tmp_path, "org/name")
    assert "hub model 'org/name' must have model-2.safetensors" in message
    assert seconds < 2
