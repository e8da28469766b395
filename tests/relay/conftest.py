import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the strict peer is shared by the tests of this folder
