"""``python -m tests.simulation SEED [COUNT]``: run one seed, or COUNT of them from SEED on."""

from __future__ import annotations

import sys
from dataclasses import asdict

from tests.simulation.world import run_seed

first = int(sys.argv[1])
for seed in range(first, first + int(sys.argv[2]) if len(sys.argv) > 2 else first + 1):
    print(seed, asdict(run_seed(seed)))
