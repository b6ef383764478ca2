"""What a head is and whether it fits a model, from its files and the model's config alone; nothing is exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import HeadSpec, Overrides, Reading, TargetShape, read_head
from eagle_exporter.survey import check_supported
from eagle_exporter.target import read_config
from eagle_graphs import EagleError

REFERENCE_TAPS = "2, n // 2, n - 3 of the target's n layers"
TAPS_ARE = "indices of hidden_states: k is the input of layer k"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The findings, in words, and every reason against the pair."""

    head: str
    target: str | None
    found: dict[str, str]
    """By what each says; empty where no layout is recognised."""
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "head": self.head,
            "target": self.target,
            **self.found,
            "notes": list(self.notes),
            "fits": not self.problems if self.target is not None else None,
            "problems": list(self.problems),
        }

    def print(self, console: Console) -> None:
        """The readable form."""
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in self.found.items():
            table.add_row(name, value)
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False, markup=False)
        against = f" {self.target}" if self.target is not None else ""
        if self.problems:
            console.print(f"{self.head} does not fit{against}:", highlight=False, markup=False)
            for problem in self.problems:
                console.print(f"- {problem}", highlight=False, markup=False)
        elif self.target is not None:
            console.print(f"{self.head} fits{against}", highlight=False, markup=False)
        else:
            console.print("whole as far as it goes; --model M says whether it fits M", highlight=False, markup=False)


def inspect_head(draft: str, model: str | None, overrides: Overrides) -> Inspection:
    """Reads a head, and the config of the model it is meant for. Raises EagleError where there is nothing to read."""
    checkpoint = find_checkpoint(draft, what="head")
    target_checkpoint = find_checkpoint(model, what="target") if model is not None else None
    problems: list[str] = []
    shape = None
    if target_checkpoint is not None:
        config = read_config(target_checkpoint)
        try:
            check_supported(config)
        except EagleError as error:
            problems.append(str(error))
        else:
            shape = TargetShape.of(config)
    reading = read_head(checkpoint, shape, overrides)
    return Inspection(
        head=checkpoint.name,
        target=target_checkpoint.name if target_checkpoint is not None else None,
        found=_findings(reading.spec, reading, shape) if reading.spec is not None else {},
        notes=reading.spec.notes if reading.spec is not None else (),
        problems=(*problems, *reading.problems),
    )


def _findings(spec: HeadSpec, reading: Reading, target: TargetShape | None) -> dict[str, str]:
    kind = "EAGLE-1/2" if spec.kind == "eagle1" else "EAGLE-3"
    if spec.kind == "eagle1":
        taps = "what the LM head reads: hidden_states after the final norm"
        taps += f", index {spec.taps[0]}" if spec.taps else ""
    else:
        taps = f"{', '.join(map(str, spec.taps))} ({TAPS_ARE})" if spec.taps else f"{REFERENCE_TAPS} ({TAPS_ARE})"
    rope = dict(spec.rope_parameters)
    rope_type, theta = rope.pop("rope_type"), rope.pop("rope_theta")
    more = "".join(f", {name} {value}" for name, value in sorted(rope.items()))
    switches = [n for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(spec, n)]
    return {
        "format": spec.layout,
        "kind": kind,
        "taps": taps,
        "positions": f"from {spec.position_offset}",
        "vocabulary": _vocabulary(spec, reading, target),
        "embedding": ("its own" if spec.own_embedding else "the target's")
        + (", multiplied as the target multiplies its own" if spec.scaled_embedding else ", as it is stored"),
        "lm_head": "its own" if spec.own_lm_head else "the target's",
        "rope": f"{rope_type}, theta {theta:g}{more}",
        "layers": (
            f"{spec.layers}, {spec.hidden_size} wide, {spec.attention_heads} heads of {spec.head_dim} over "
            f"{spec.kv_heads} of keys"
        ),
        "switches": ", ".join(switches) or "none",
        "parameters": f"{reading.parameters:,}",
    }


def _vocabulary(spec: HeadSpec, reading: Reading, target: TargetShape | None) -> str:
    size = f"{spec.draft_vocab_size:,}"
    if reading.draft_to_target is None:
        return f"{size} tokens, the target's own ids"
    of = f" of {target.vocab_size:,}" if target is not None else ""
    return f"{size}{of} tokens, mapped by d2t"
