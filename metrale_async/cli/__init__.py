"""The command line: serve, generate, chat, models, bench, doctor.

Owns the turning of flags and environment variables into configuration objects, and what is printed in a terminal. It
may import everything else in metrale_async; nothing but ``__main__`` imports it. Commands are imported when they run,
and torch only when a model is loaded, so that ``--help`` answers at once.
"""

from metrale_async.cli.main import main

__all__ = ["main"]
