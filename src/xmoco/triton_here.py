"""Whether the fast kernels can run here: Triton comes with PyTorch for CUDA, but not everywhere."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None
