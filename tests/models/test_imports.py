"""What importing the package costs a start: libraries that only some commands need stay out."""

from __future__ import annotations

import os
import subprocess
import sys


def test_importing_models_loads_no_library_that_only_downloads_or_tests_need() -> None:
    script = (
        "import sys, metrale_async.models\n"
        "print(*[n for n in ('huggingface_hub', 'transformers', 'requests') if n in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.split() == []
