"""The whole test suite: `python test_all.py` or `pytest test_all.py` (add --slow for the long ones; CI runs them)."""
import os

os.environ.setdefault("TRITON_INTERPRET", "1")    # before kernels.py is imported: the Triton kernels run on CPU tensors
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

# ================================================================ prepare_fineweb.py: data, tokenizers, configure()

# ================================================================ kernels.py

# ================================================================ every model: the generic block

# ================================================================ model_move.py: MoVE

# ================================================================ sample.py

# ================================================================ train.py

# ================================================================ experiments/


if __name__ == "__main__":
    sys.exit(pytest.main([str(ROOT / "test_all.py"), "-q", "-x", *sys.argv[1:]]))
