"""``--help`` answers before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from metrale_async.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent.parent
HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub", "gguf")
PROGRAM = f"""
import sys
from metrale_async.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as exit:
    code = exit.code
loaded = [name for name in {HEAVY!r} if name in sys.modules]
assert not loaded, loaded
sys.exit(code)
"""


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command.split(), "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "storage")))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr
    assert "usage:" in finished.stdout
