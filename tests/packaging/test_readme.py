"""README is true: its tables follow from the declarations, its examples run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from metrale_async.cli.reference import rewrite

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text("utf-8")
ADDRESS = "127.0.0.1:8888"


def examples(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def example(language: str, words: str) -> str:
    (found,) = (text for text in examples(language) if words in text)
    return found


def test_the_tables_are_those_of_the_declarations() -> None:
    assert rewrite(README) == README, "run `make docs`"


def test_a_table_without_a_place_is_missed() -> None:
    with pytest.raises(ValueError, match="the table 'parameters'"):
        rewrite(README.replace("<!-- parameters:", "<!-- parametres:"))


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_relative_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_make_target_that_readme_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = set(re.findall(r"make ([a-z-]+)", README)) - {"docs"} | {"docs"}
    assert named <= targets


def environment() -> dict[str, str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "storage")))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def address(smollm2_gguf: Path) -> Iterator[str]:
    """host:port of a real server with the default model, started by the command line."""
    command = [sys.executable, "-m", "metrale_async", "serve", "smollm2-135m", "--port", "0"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        for line in process.stdout:
            if found := re.search(r"http://(127\.0\.0\.1:\d+)", line):
                yield found.group(1)
                break
        else:
            pytest.fail(f"the server ended with {process.wait()}: {process.stderr.read()}")
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


def run(command: list[str] | str, **options: object) -> str:
    finished = subprocess.run(  # type: ignore[call-overload]
        command, env=environment(), capture_output=True, text=True, timeout=100, **options
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    output: str = finished.stdout
    return output


def test_the_curl_example_is_answered(address: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    answer = run(example("sh", "curl").replace(ADDRESS, address), shell=True)
    assert '"finish_reason"' in answer
    assert '"role":"assistant"' in answer.replace(" ", "")


def test_the_openai_client_example_streams_an_answer(address: str) -> None:
    assert len(run([sys.executable, "-c", example("python", "from openai").replace(ADDRESS, address)]).split()) > 3


def test_the_embedding_example_runs(smollm2_gguf: Path) -> None:
    answer = run([sys.executable, "-c", example("python", "AsyncEngine")])
    assert "Paris" in answer
    assert answer.count("Name a") == 3
