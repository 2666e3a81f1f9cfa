"""Models of the Hugging Face hub, through huggingface_hub and its cache; code in a repository is never fetched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from metrale_async.errors import ModelNotFoundError

_HUB_ID: Final = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>[\w./-]+\.gguf))?")
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
# Mistral and Llama repositories hold the same weights a second time, in their authors' own layout.
_UNWANTED: Final = ["consolidated*", "original/*"]


def parse_hub_id(name: str) -> tuple[str, str | None] | None:
    """``org/name`` or ``org/name:file.gguf`` -> repository and file; None for anything else."""
    match = _HUB_ID.fullmatch(name)
    return None if match is None else (match["repo"], match["file"])


def hub_path(repo: str, file: str | None, *, allow_download: bool) -> Path:
    """The local directory of ``repo``, or of the one ``file`` in it; downloads what is missing if allowed.

    The hub library's own settings count (``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` ...), so that
    models fetched by other tools are found. Raises ModelNotFoundError that says what to do.
    """
    # Imported here: the library takes half a second that a start from a local file need not wait for.
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    name = f"{repo}:{file}" if file else repo
    try:
        if file is not None:
            return Path(hf_hub_download(repo, file, local_files_only=not allow_download))
        return Path(
            snapshot_download(
                repo, allow_patterns=_WANTED, ignore_patterns=_UNWANTED, local_files_only=not allow_download
            )
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated: accept its terms on the hub and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(f"{name} is not on the hub, or is private and HF_TOKEN is not set") from error
    except errors.LocalEntryNotFoundError as error:
        if allow_download:
            raise ModelNotFoundError(f"{name} could not be downloaded: {error}") from error
        raise ModelNotFoundError(
            f"{name} is not on this machine; fetch it with `python -m metrale_async models pull {name}`"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ModelNotFoundError(f"{name}: there is no such file in the repository") from error
    except (_transport_error(), errors.XetDownloadError, OSError, ValueError) as error:
        raise ModelNotFoundError(f"{name} could not be downloaded: {error}") from error


def _transport_error() -> type[Exception]:
    """What the hub library's HTTP client raises for a broken connection; which client it is depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__bases__[0]
    return base


def cached_hub_models() -> list[tuple[str, Path, int]]:
    """Repositories in the hub library's cache that look like a model: (repository, snapshot, bytes)."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    found = []
    for repository in repositories:
        for revision in repository.revisions:
            names = {file.file_name for file in revision.files}
            if repository.repo_type == "model" and ("config.json" in names or any(n.endswith(".gguf") for n in names)):
                found.append((repository.repo_id, revision.snapshot_path, revision.size_on_disk))
    return sorted(found)
