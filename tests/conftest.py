"""The models of the tests are tiny: one thread is faster than two, and gives the same sums everywhere."""

import os

import torch

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)
