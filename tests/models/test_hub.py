"""Hub ids against a stand-in for the hub, in a process of its own, since the endpoint is read at import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metrale_async.models.hub import parse_hub_id
from tests.models.hub_server import COMMIT, HubServer

REPOSITORIES = {
    "org/model": {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": b"weights" * 1000,
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "modeling_custom.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"the same again",
        "README.md": b"# Model",
    },
    "org/quantised": {"tiny.Q4_0.gguf": b"GGUF" * 100, "tiny.Q8_0.gguf": b"GGUF" * 200, "README.md": b""},
    "org/cut": {"config.json": b"{}", "model.safetensors": b"x" * 100_000},
}
# Each line: what to resolve, and whether downloading is allowed.
STEPS = [
    ("org/model", False),
    ("org/model", True),
    ("org/model", False),
    ("org/quantised:tiny.Q4_0.gguf", True),
    ("org/quantised:tiny.Q4_0.gguf", False),
    ("org/quantised:absent.gguf", True),
    ("org/quantised", True),
    ("org/gated", True),
    ("org/absent", True),
    ("org/cut", True),
    ("org/cut", False),
]
SCRIPT = """
import json, sys
from metrale_async.errors import MetraleError
from metrale_async.models import list_models, resolve_model
outcomes = []
for name, allow_download in json.loads(sys.argv[1]):
    try:
        source = resolve_model(name, allow_download=allow_download)
        outcomes.append({"kind": source.kind, "path": str(source.path), "display_name": source.display_name})
    except MetraleError as error:
        outcomes.append({"error": type(error).__name__, "message": str(error)})
print(json.dumps([outcomes, [model.name for model in list_models()]]))
"""


def run_script(endpoint: str, home: Path, steps: list[tuple[str, bool]]) -> tuple[list[dict[str, Any]], list[str]]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "METRALE_MODELS_DIR": str(home / "models"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(steps)], env=environment, capture_output=True, text=True, timeout=90
    )
    assert finished.returncode == 0, finished.stderr
    outcomes, listed = json.loads(finished.stdout)
    return outcomes, listed


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Outcome of each of STEPS, the models listed afterwards, and the requests the hub saw."""
    server = HubServer(REPOSITORIES)
    server.gated.add("org/gated")
    server.truncated.add("org/cut/model.safetensors")
    with server.running():
        outcomes, listed = run_script(server.url, tmp_path_factory.mktemp("hub"), STEPS)
    return outcomes, listed, server.requests


Hub = tuple[list[dict[str, Any]], list[str], list[str]]


def test_nothing_is_downloaded_unless_it_is_allowed(hub: Hub) -> None:
    assert hub[0][0]["error"] == "ModelNotFoundError"
    assert "models pull org/model" in hub[0][0]["message"]
    assert hub[0][2] == hub[0][1]
    assert sum("api/models/org/model/revision" in request for request in hub[2]) == 1


def test_a_repository_arrives_without_code_pickles_or_second_copies(hub: Hub) -> None:
    outcome = hub[0][1]
    assert (outcome["kind"], outcome["display_name"]) == ("hf_directory", "org/model")
    path = Path(outcome["path"])
    assert path.name == COMMIT
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert (path / "model.safetensors").read_bytes() == REPOSITORIES["org/model"]["model.safetensors"]
    assert not [request for request in hub[2] if request.endswith((".py", ".bin"))]


def test_one_gguf_file_of_a_repository_arrives_alone(hub: Hub) -> None:
    outcome = hub[0][3]
    assert (outcome["kind"], outcome["display_name"]) == ("gguf", "org/quantised:tiny.Q4_0.gguf")
    assert Path(outcome["path"]).read_bytes() == REPOSITORIES["org/quantised"]["tiny.Q4_0.gguf"]
    assert [file.name for file in Path(outcome["path"]).parent.iterdir()] == ["tiny.Q4_0.gguf"]
    assert hub[0][4] == outcome


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (5, "org/quantised:absent.gguf: there is no such file"),
        (6, "name the one to use: org/quantised:file.gguf"),
        (7, "org/gated is gated"),
        (8, "org/absent is not on the hub, or is private"),
        (9, "org/cut could not be downloaded"),
        (10, "org/cut is not on this machine"),
    ],
)
def test_what_goes_wrong_is_told_with_the_name_of_the_model(step: int, words: str, hub: Hub) -> None:
    assert hub[0][step]["error"] == "ModelNotFoundError"
    assert words in hub[0][step]["message"]


def test_downloaded_repositories_are_listed(hub: Hub) -> None:
    assert "smollm2-135m" in hub[1]
    assert {"org/model", "org/quantised"} <= set(hub[1])


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("org/name", ("org/name", None)),
        ("Org-1/na.me_2", ("Org-1/na.me_2", None)),
        ("org/name:file.gguf", ("org/name", "file.gguf")),
        ("org/name:sub/file.gguf", ("org/name", "sub/file.gguf")),
        ("name", None),
        ("org/name/more", None),
        ("org/name:file.bin", None),
        ("org/name:", None),
        ("../name", None),
        ("org/..", None),
        ("org/na me", None),
        ("", None),
    ],
)
def test_only_what_looks_like_a_hub_id_is_one(name: str, parsed: tuple[str, str | None] | None) -> None:
    assert parse_hub_id(name) == parsed
