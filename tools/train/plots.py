"""Curves as PNG files, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_training(history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Loss, and acceptance of training rows and of held-out chains, over tokens; whether it could be drawn."""
    if (pyplot := _pyplot()) is None:
        return False
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    tokens = [point["tokens"] for point in history]
    left.plot(tokens, [point["loss"] for point in history])
    left.set(xlabel="training tokens", ylabel="loss")
    for step in range(max(len(point["acceptance"]) for point in history)):
        seen = [point for point in history if len(point["acceptance"]) > step]
        right.plot(
            [point["tokens"] for point in seen],
            [point["acceptance"][step] for point in seen],
            color=f"C{step}",
            alpha=0.4,
            label=f"trained on, step {step + 1}",
        )
    measured = [point for point in history if point["held_out"]]
    for step in range(len(measured[0]["held_out"]["acceptance"]) if measured else 0):
        shares = [point["held_out"]["acceptance"][step] for point in measured]
        right.plot([p["tokens"] for p in measured], shares, "--", color=f"C{step}", label=f"held out, token {step + 1}")
    right.set(xlabel="training tokens", ylabel="best guess is the text's token")
    right.legend(fontsize="x-small")
    return _save(pyplot, figure, path)


def plot_calibration(bins: Sequence[tuple[float, float, int]], path: Path) -> bool:
    """Acceptance against the draft's confidence: (confidence, acceptance, guesses) of each bin."""
    if (pyplot := _pyplot()) is None:
        return False
    figure, axes = pyplot.subplots(figsize=(5, 5), constrained_layout=True)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.plot([confidence for confidence, _, _ in bins], [accepted for _, accepted, _ in bins], "o-")
    axes.set(
        xlabel="the draft's probability of a guess", ylabel="share that the target accepts", xlim=(0, 1), ylim=(0, 1)
    )
    return _save(pyplot, figure, path)


def _pyplot() -> Any:
    """matplotlib's pyplot without a window; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
