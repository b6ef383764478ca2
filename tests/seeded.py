"""Random numbers that are the same for a test whichever tests ran before it (`tests/conftest.py` begins them anew)."""

from __future__ import annotations

import numpy as np

RANDOM = np.random.default_rng(0)
_START = RANDOM.bit_generator.state


def start_again() -> None:
    RANDOM.bit_generator.state = _START
