# SPDX-License-Identifier: Apache-2.0
"""From a model name to a folder: `demo`, a local directory, or a hub id `org/name[@revision]`.

A local directory always wins over the hub. Only data is ever downloaded: configuration,
safetensors and tokenizer files; never pickles, never code. `huggingface_hub` reads the
environment (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, ...); this module does not.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from specla.errors import ConfigError, InvalidCheckpoint, ModelNotFound
from specla.models.files import read_json_object

if TYPE_CHECKING:
    from collections.abc import Iterable

DEMO = "demo"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Not "*.safetensors": the hub's patterns cross folders, and some repositories keep second copies.
DOWNLOAD_PATTERNS = (
    "config.json",
    "generation_config.json",
    SINGLE_FILE,
    "model-*.safetensors",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*", re.ASCII)


def resolve(name: str, *, revision: str | None = None) -> Path:
    """The folder that holds the model called `name`, downloaded first if it is a hub id.

    Args:
        name: `demo`, a directory, or `org/name` with an optional `@revision`.
        revision: a branch, tag or commit of a hub id.

    Raises:
        ModelNotFound: no such directory and no such reachable or cached repository; the message
            names both attempts, or the exact file that is missing.
        ConfigError: a revision where there is none to choose, or given twice.
    """
    _check_name(name)
    folder = _demo_folder() if name == DEMO else _local_path(name)
    if name == DEMO or _is_dir(folder):
        if revision is not None:
            raise ConfigError(
                f"revision chooses a version of a hub model, but {name!r} is a folder on this "
                f"machine; leave out revision={revision!r}"
            )
        return _checked_folder(folder)
    repo, revision = _hub_id(name, revision)
    return _from_hub(repo, revision)


def _check_name(name: str) -> None:
    if not name.strip() or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name):
        raise ModelNotFound(
            "a model name must be 'demo', a directory or a hub id 'org/name', without control "
            f"characters; got {name!r}"
        )


def _demo_folder() -> Path:
    return Path(str(resources.files("specla"))) / "assets" / DEMO


def _local_path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # ~somebody, and there is no such user
        return Path(name)


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # for example a name longer than the file system allows
        return False


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"a model directory must hold config.json, but {folder / 'config.json'} does not "
            "exist; give the directory of a checkpoint"
        )
    return folder


def _hub_id(name: str, revision: str | None) -> tuple[str, str | None]:
    """Split `org/name[@revision]` and refuse what cannot be a hub id before any network use."""
    repo, at, tagged = name.partition("@")
    if at and revision is not None:
        raise ConfigError(
            f"a revision must be given once, got {tagged!r} in the name and revision={revision!r}"
        )
    revision = tagged if at else revision
    valid = _HUB_ID.fullmatch(repo) and len(repo) <= 96 and ".." not in repo and "--" not in repo
    if not valid:
        what = "it is not a directory" if _exists(_local_path(name)) else "no such directory"
        raise ModelNotFound(
            f"model {_short(name)} not found: as a directory: {what}; as a hub id: not of the "
            "form org/name; give 'demo', a checkpoint's directory or a hub id"
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ModelNotFound(
            f"a revision must be a branch, tag or commit of {repo}, got {_short(revision)}"
        )
    return repo, revision


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")


def _from_hub(repo: str, revision: str | None) -> Path:
    # Imported here: the library takes long to import and a local model does not need it.
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS))
    except Exception as error:  # network failures share no base class
        raise ModelNotFound(_hub_message(repo, revision, error)) from error
    _check_complete(Path(folder), repo)
    return Path(folder)


def _hub_message(repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors as hub

    at = f" at revision {revision!r}" if revision else ""
    head = f"model {repo!r} not found: as a directory: no such directory; as a hub id{at}: "
    if isinstance(error, hub.GatedRepoError):
        return head + "access must be granted first; accept its terms on the hub and log in"
    if isinstance(error, hub.RepositoryNotFoundError):
        return head + "no such repository, or a private one; check the name or log in"
    if isinstance(error, hub.RevisionNotFoundError):
        return head + "the repository has no such revision; check the revision"
    if isinstance(error, hub.IncompleteSnapshotError):
        return head + _one_line(error) + "; connect to the network to finish the download"
    if isinstance(error, hub.LocalEntryNotFoundError):
        cause = error.__cause__
        offline = isinstance(cause, hub.OfflineModeIsEnabled)
        why = "offline mode is on" if offline else f"hub unreachable ({type(cause).__name__})"
        return (
            f"{head}{why} and config.json of {repo} is not in the local cache; "
            "connect to the network once, or give a directory"
        )
    return head + _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _check_complete(folder: Path, repo: str) -> None:
    """A cached snapshot may be partial: name the first missing file, not just the repository."""
    for file in _needed_files(folder):
        if not (folder / file).is_file():
            raise ModelNotFound(
                f"hub model {repo!r} must have {file}, which is neither in the repository nor in "
                f"the local cache ({folder}); connect to the network to finish the download, or "
                "choose a repository with safetensors weights"
            )


def _needed_files(folder: Path) -> Iterable[str]:
    yield "config.json"
    if (folder / SINGLE_FILE).is_file() or not (folder / INDEX_FILE).is_file():
        yield SINGLE_FILE
        return
    shards = read_json_object(folder / INDEX_FILE).get("weight_map")
    if not isinstance(shards, dict):
        raise InvalidCheckpoint(f"{folder / INDEX_FILE} must hold a weight_map object")
    yield from sorted({str(shard) for shard in shards.values()})
