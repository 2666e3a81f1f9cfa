"""From the name a user gives to files on this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metrale_async.errors import ModelNotFoundError
from metrale_async.models.catalogue import CATALOGUE, fetch, fetched_path, models_folder
from metrale_async.models.hub import cached_hub_models, hub_path, parse_hub_id


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Files of one model. ``path`` is the directory of a Hugging Face checkpoint, or the ``.gguf`` file itself."""

    kind: Literal["hf_directory", "gguf"]
    path: Path
    display_name: str
    """What the model is called in answers: the short name, the hub id, or the last part of the path."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One line of ``models list``."""

    name: str
    description: str
    license: str | None
    size_bytes: int
    path: Path | None
    """None for a catalogue model that is not on this machine yet."""


def resolve_model(name: str, *, allow_download: bool = False) -> ModelSource:
    """Find the model called ``name``: an existing path, a catalogue name, or a hub id ``org/name[:file.gguf]``.

    A path wins over the others. Nothing is downloaded unless ``allow_download``. Raises ModelNotFoundError that says
    what was looked for, CheckpointError for a download that is not what it should be.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        return _from_path(path)
    entry = CATALOGUE.get(name)
    if entry is not None:
        fetched = fetched_path(entry)
        if fetched is None:
            if not allow_download:
                raise ModelNotFoundError(
                    f"{name} is not on this machine; fetch it with `python -m metrale_async models pull {name}`"
                )
            fetched = fetch(entry)
        return ModelSource("gguf", fetched, name)
    hub_id = None if name.startswith((".", "/", "~")) else parse_hub_id(name)
    if hub_id is not None:
        repo, file = hub_id
        located = hub_path(repo, file, allow_download=allow_download)
        if file is not None:
            return ModelSource("gguf", located, name)
        if not (located / "config.json").is_file():
            raise ModelNotFoundError(
                f"{name} holds no config.json; if it holds GGUF files, name the one to use: {name}:file.gguf"
            )
        source = _from_path(located)
        return dataclasses.replace(source, display_name=name)
    raise ModelNotFoundError(
        f"there is no model {name!r}: it is neither a path on this machine, nor a short name "
        f"({', '.join(sorted(CATALOGUE))}), nor a hub id (org/name or org/name:file.gguf)"
    )


def pull_model(name: str) -> ModelSource:
    """Fetch ``name`` unless it is on this machine already."""
    return resolve_model(name, allow_download=True)


def list_models() -> list[ListedModel]:
    """The catalogue, then what else lies in the models folder, then the hub library's cache."""
    listed = []
    for entry in CATALOGUE.values():
        listed.append(
            ListedModel(entry.name, entry.description, entry.license, entry.member_bytes, fetched_path(entry))
        )
    known = {entry.file_name for entry in CATALOGUE.values()}
    folder = models_folder()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name in known or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix == ".gguf":
            listed.append(ListedModel(str(path), "GGUF file", None, path.stat().st_size, path))
        elif (path / "config.json").is_file():
            size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
            listed.append(ListedModel(str(path), "Hugging Face directory", None, size, path))
    for repo, snapshot, size in cached_hub_models():
        listed.append(ListedModel(repo, "Hugging Face hub, in its cache", None, size, snapshot))
    return listed


def _from_path(path: Path) -> ModelSource:
    name = path.resolve().name
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is no model: allowed are a .gguf file or a directory")
        return ModelSource("gguf", path, name.removesuffix(".gguf"))
    if (path / "config.json").is_file():
        return ModelSource("hf_directory", path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource("gguf", files[0], files[0].stem)
    if files:
        raise ModelNotFoundError(f"{path} holds {len(files)} .gguf files; name one: {', '.join(f.name for f in files)}")
    raise ModelNotFoundError(f"{path} holds neither a config.json nor a .gguf file")
