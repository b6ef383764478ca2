"""Weights for engines that were built without them: put in when an engine is loaded, from the ONNX behind it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_graphs import EagleError

NAMED = 4
"""Missing weights that a message names."""


def refit(trt: Any, engine: Any, onnx: Path, logger: Any, errors: Sequence[str]) -> None:
    """Puts the weights of an ONNX file, and of the file of weights beside it, into an engine that has none.

    Args:
        trt: the library's module, of either flavour.
        engine: loaded, with no context yet.
        onnx: the graph that the engine was built from.
        logger: the library's words go there.
        errors: what the logger keeps of them.

    Raises:
        EagleError: the engine cannot take weights, or not all of its own are in the file; with the library's reason.
    """
    if not engine.refittable:
        raise EagleError(f"the manifest says that the engine of {onnx.name} has no weights; it has: build it again")
    before = len(errors)
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    taken = parser.refit_from_file(str(onnx))
    missing = refitter.get_missing_weights()
    if taken and not missing and refitter.refit_cuda_engine():
        return
    reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)] or list(errors[before:])
    reason = " ".join(reasons[0].split())[:300] if reasons else "it gives no reason"
    if missing:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        reason = f"weights are missing: {', '.join(missing[:NAMED])}{more} ({reason})"
    raise EagleError(
        f"{trt.__name__} {trt.__version__} cannot put the weights of {onnx} into its engine: {reason}; build it again "
        "with eagle-build"
    )
