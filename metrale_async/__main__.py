"""``python -m metrale_async``."""

import sys

from metrale_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
