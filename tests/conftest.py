"""What all tests share."""

import os

# Before torch is imported: two test processes on two cores must not fight for both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

torch.set_num_threads(1)
