"""eagle-export --plan: what a pair would gain on a machine, from the two configs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from eagle_exporter import experts
from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads.config import ConfigReader
from eagle_exporter.survey import check_supported
from eagle_exporter.target import read_config
from eagle_graphs import EagleError, KVGeometry, Profile
from eagle_graphs.machines import Machine
from eagle_graphs.roofline import (
    Compiled,
    GraphSize,
    PassTime,
    RoundTime,
    capacity_rows,
    expected_length,
    round_time,
    verdicts,
)

_EAGLE3 = {"draft_vocab_size", "eagle_config", "speculators_model_type", "eagle_aux_hidden_state_layer_ids"}
_TAPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for."""

    model: str
    draft: str
    machine: Machine
    precision: str
    head_precision: str
    profiles: tuple[Profile, ...]
    context: int
    """Rows committed before the round that is timed."""
    accepted_lengths: tuple[float, ...] = ()
    """Of each profile, or one for all; none where only the break-even is wanted."""
    acceptance: tuple[float, ...] = ()
    """Instead of lengths: how often a node's n-th best child is accepted, the node being so."""
    overhead: float = 0.0
    """Seconds a pass."""

    def __post_init__(self) -> None:
        if self.context < 0 or self.overhead < 0:
            raise EagleError(
                f"--context is {self.context} and --overhead-us {self.overhead * 1e6:g}; expected 0 or more"
            )
        if self.accepted_lengths and self.acceptance:
            raise EagleError("--accepted-length states lengths, --acceptance computes them: leave one out")
        if len(self.accepted_lengths) not in (0, 1, len(self.profiles)):
            raise EagleError(
                f"--accepted-length has {len(self.accepted_lengths)} values for {len(self.profiles)} profiles; "
                "expected one, or one for each"
            )
        if wrong := [length for length in self.accepted_lengths if not length >= 1]:
            raise EagleError(f"--accepted-length is {wrong[0]:g}; expected 1 or more, since every round gives a token")
        falling = list(self.acceptance) == sorted(self.acceptance, reverse=True)
        if not (falling and all(0 <= share <= 1 for share in self.acceptance) and sum(self.acceptance) <= 1):
            raise EagleError(
                f"--acceptance is {','.join(f'{share:g}' for share in self.acceptance)}; expected shares "
                "that fall and together are at most 1, as in 0.6,0.15,0.06"
            )

    def lengths(self) -> list[float | None]:
        """The accepted length of each profile."""
        if self.acceptance:
            return [expected_length(profile, self.acceptance) for profile in self.profiles]
        given: Sequence[float | None] = self.accepted_lengths or (None,)
        return [*given] * (len(self.profiles) if len(given) == 1 else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer."""

    target: Compiled
    draft: Compiled
    context: int
    plain: PassTime
    rounds: tuple[RoundTime, ...]
    capacity: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        verdict = verdicts(self.rounds)
        return {
            "machine": asdict(self.target.machine),
            "context": self.context,
            "weight_bytes": {"target": self.target.weight_bytes, "draft": self.draft.weight_bytes},
            "cache_bytes_per_token": self.target.row_bytes + self.draft.row_bytes,
            "capacity_tokens": self.capacity,
            "plain_ms": self.plain.seconds * 1e3,
            "profiles": {
                str(each.profile.nodes): {
                    "verify_ms": each.verify.seconds * 1e3,
                    "draft_ms": [level.seconds * 1e3 for level in each.draft],
                    "round_ms": each.seconds * 1e3,
                    "bound": each.verify.bound,
                    "break_even": each.break_even,
                    "accepted_length": each.accepted_length,
                    "speedup": each.speedup,
                    "verdict": verdict[each.profile.nodes],
                }
                for each in self.rounds
            },
        }

    def print(self, console: Console) -> None:
        """The readable form."""
        machine, target, draft = self.target.machine, self.target, self.draft
        table = Table("profile", "verify", "draft", "round", "break-even", "accepted", "speed-up", "build?")
        table.title = f"least milliseconds on {machine.name}, {self.context} tokens of context"
        table.add_row("plain", _ms(self.plain), "", _ms(self.plain), "", "1.00", "1.00x")
        verdict = verdicts(self.rounds)
        for each in self.rounds:
            table.add_row(
                str(each.profile.nodes),
                _ms(each.verify),
                _ms(*each.draft),
                _ms(each.verify, *each.draft),
                f"{each.break_even:.2f}",
                "" if each.accepted_length is None else f"{each.accepted_length:.2f}",
                "" if each.speedup is None else f"{each.speedup:.2f}x",
                verdict[each.profile.nodes],
            )
        if any(each.verify.bound == "arithmetic" for each in self.rounds):
            table.caption = "* bound by arithmetic, the others by memory"
        console.print(table)
        room = "" if self.capacity is None else f"; {self.capacity:,} tokens of cache fit beside them"
        console.print(
            f"weights: target {_gigabytes(target.weight_bytes)} ({target.precision}), head "
            f"{_gigabytes(draft.weight_bytes)} ({draft.precision}){room} "
            f"({(target.row_bytes + draft.row_bytes) / 1e3:.1f} kB each)",
            highlight=False,
        )
        console.print(
            "floors: no kernel reaches a machine's limits; --efficiency and --overhead-us make estimates of them",
            highlight=False,
        )


def plan(options: PlanOptions) -> Plan:
    """Plans from the configs. Raises EagleError where one is missing or cannot be exported."""
    config = read_config(find_checkpoint(options.model, what="target", config_only=True))
    with_fusion, head = sizes(config, find_checkpoint(options.draft, what="head", config_only=True).config())
    target, draft = (
        Compiled(size=size, precision=precision, machine=options.machine, overhead=options.overhead)
        for size, precision in ((with_fusion, options.precision), (head, options.head_precision))
    )
    rounds = tuple(
        round_time(target, draft, profile, context=options.context, accepted_length=length)
        for profile, length in zip(options.profiles, options.lengths(), strict=True)
    )
    return Plan(
        target=target,
        draft=draft,
        context=options.context,
        plain=rounds[0].plain,
        rounds=rounds,
        capacity=capacity_rows(target, draft),
    )


def sizes(config: PretrainedConfig, head: Mapping[str, Any]) -> tuple[GraphSize, GraphSize]:
    """Sizes of the target's graph, with the fusion of features that is part of it, and of the head's."""
    target = target_size(config)
    draft, fused = _head_size(head, hidden=int(config.hidden_size), vocab_size=int(config.vocab_size))
    return (
        GraphSize(
            linear=target.linear + fused,
            lm_head=target.lm_head,
            embedding=target.embedding,
            attention_heads=target.attention_heads,
            kv=target.kv,
        ),
        draft,
    )


def target_size(config: PretrainedConfig) -> GraphSize:
    """Counted on the model built without storage, whatever its architecture. Raises EagleError as an export would."""
    kv = check_supported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, experts_implementation=experts.IMPLEMENTATION)
    table = cast(nn.Embedding, model.get_input_embeddings()).weight
    lm_head = cast(nn.Linear, model.get_output_embeddings()).weight
    tied = bool(getattr(config, "tie_word_embeddings", False))
    everything = sum(parameter.numel() for parameter in model.parameters())
    apart = {id(parameter): parameter.numel() for parameter in (table, lm_head)}
    return GraphSize(
        linear=everything - sum(apart.values()),
        lm_head=lm_head.numel(),
        embedding=0 if tied else table.numel(),
        attention_heads=int(config.num_attention_heads),
        kv=kv,
    )


def _head_size(config: Mapping[str, Any], *, hidden: int, vocab_size: int) -> tuple[GraphSize, int]:
    """The head's graph, and the weights of EAGLE-3's `fc`, which the target's graph holds.

    The head is taken to share the target's embedding, as most do.
    """
    problems: list[str] = []
    top = ConfigReader(config, problems)
    body = top.section("transformer_layer_config") if "transformer_layer_config" in top else top
    width, heads = body.size("hidden_size"), body.size("num_attention_heads")
    kv_heads, inner = body.size("num_key_value_heads", default=heads), body.size("intermediate_size")
    head_dim = body.size("head_dim", default=width // heads if width and heads else 0)
    layers = body.size("num_hidden_layers", default=1)
    vocabulary = top.size("draft_vocab_size", default=vocab_size)
    if problems:
        raise EagleError(f"head: {'; '.join(problems)}")
    names = " ".join(map(str, config.get("architectures") or []))
    eagle3 = bool(config.keys() & (_EAGLE3 | {"eagle_feature_layers"})) or "Eagle3" in names
    reading, rest = width * (heads + 2 * kv_heads) * head_dim, heads * head_dim * width + 3 * width * inner
    joined = reading if eagle3 else 2 * width * width  # the token's half: of EAGLE-3's queries, keys and values, or fc
    size = GraphSize(
        linear=layers * (reading + rest) + joined,
        lm_head=vocabulary * width,
        embedding=0,
        attention_heads=heads,
        kv=KVGeometry(layers=layers, kv_heads=kv_heads, head_dim=head_dim),
    )
    return size, _TAPS * hidden * width if eagle3 else 0


def _ms(*passes: PassTime) -> str:
    mark = "*" if len(passes) == 1 and passes[0].bound == "arithmetic" else ""
    return f"{sum(each.seconds for each in passes) * 1e3:.3f}{mark}"


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"
