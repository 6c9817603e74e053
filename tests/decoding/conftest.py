"""Let the tests here share tiny_translation.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
