"""Passes of frozen shapes: which of them serves a call, and how a smaller call lies within it.

An engine runs at the shapes it was built for and at no others. A call of fewer rows is padded: a row of padding sees
itself alone, asks for nothing, and writes its keys and values behind the rows that are kept. Since new rows are
written at kv_length + S - Q, a pass serves a call only where S - Q, the rows of earlier levels, is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eagle_graphs import EagleError, GraphPorts
from eagle_graphs.passes import Pass
from eagle_runtime.engines.base import Array


def choose_pass(passes: Sequence[Pass], sizes: Mapping[str, int]) -> int:
    """Index of the smallest pass that holds a call of these sizes (Q, S, R). Raises EagleError where there is none."""
    rows, after, asked = sizes["Q"], sizes["S"], sizes["R"]
    fits = [
        (each.rows, each.asked, index)
        for index, each in enumerate(passes)
        if each.rows >= rows and each.asked >= asked and each.after - each.rows == after - rows
    ]
    if not fits:
        held = ", ".join(each.name for each in passes)
        raise EagleError(
            f"the engine has no pass for {rows} rows behind {after - rows} of earlier levels with {asked} results; it "
            f"has {held}: build it again, with the version that runs it"
        )
    return min(fits)[-1]


def pad_mask(mask: Array, sizes: Mapping[str, int]) -> None:
    """Makes the rows of a pass's mask [B, Qp, Sp] that a call of these sizes does not fill see themselves alone."""
    rows, after = sizes["Q"], sizes["S"]
    mask[:, :rows, after:] = False
    mask[:, rows:] = False
    padding = np.arange(rows, mask.shape[1])
    mask[:, padding, after - rows + padding] = True


def views(arrays: Mapping[str, Array], ports: GraphPorts, sizes: Mapping[str, int]) -> dict[str, Array]:
    """The part of each array that a call of these sizes fills or reads."""
    by_name = {port.name: port for port in (*ports.inputs, *ports.outputs)}
    return {
        name: array[tuple(slice(axis if isinstance(axis, int) else sizes[axis]) for axis in by_name[name].axes)]
        for name, array in arrays.items()
    }
