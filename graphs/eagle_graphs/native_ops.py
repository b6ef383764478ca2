"""The CPU kernels' ops (domain `eagle.cpu`): names, version and layouts. `native/` holds them, in C++.

    TreeAttention    the neutral op on rows, with packed queries, keys and values, and rotary, inside
    QuantLinear      float rows -> int8 with a scale a row, or two -> int8 product -> float; a norm or a gate
                     before it and a residual behind it inside
    QuantEmbedding   rows of an int8 table
    TopLogprobs      the best tokens of a row of logits and their log-probabilities

A row's result depends on that row alone (in attention: on its path), bit for bit, whatever runs beside it.
"""

from __future__ import annotations

DOMAIN = "eagle.cpu"
VERSION = 1

TREE_ATTENTION = "TreeAttention"
QUANT_LINEAR = "QuantLinear"
QUANT_EMBEDDING = "QuantEmbedding"
TOP_LOGPROBS = "TopLogprobs"

KEY_BLOCK = 16
"""Rows of a block of the key cache: [C, D] is kept as [C / KEY_BLOCK, D, KEY_BLOCK]."""
WIDE_MULTIPLE = 64
"""The inputs of a QuantLinear that have 16 bits are a multiple of this many."""
