"""Loaded before all other test code, and before anything that imports triton."""

import os

# Triton's kernels run in the tests' process, on the CPU. What compiles them for a GPU starts a process of its own.
os.environ["TRITON_INTERPRET"] = "1"
