"""Let the tests here, and the processes that they start, share small_run.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
