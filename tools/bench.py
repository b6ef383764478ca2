"""EAGLE against plain decoding of the same bundle, over a file of prompts.

    python tools/bench.py BUNDLE [--prompts FILE.jsonl] [--json]
    python tools/bench.py BUNDLE --profile 4,8,16,auto-lookup,auto,lookup
    python tools/bench.py BUNDLE --temperature 0.3,0.7,1 --top-p 0.9 --verify-mode deterministic,sampled

One row for every profile, temperature and way of verifying; "8+lookup" looks up too, "auto-lookup" does not. All
answer a prompt in turn, plain decoding among them, each first in turn, so that a noisy machine is unfair to none: read
the ratios. The speed-up is that of tokens a second over all prompts, which is the ratio of the decode times where both
say the same; the accepted length is counted over all rounds (definitions: eagle_runtime/stats.py).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle_graphs import EagleError
from eagle_graphs.command_line import run_command
from eagle_runtime import Session
from eagle_runtime.answer import Generation, StreamOptions
from eagle_runtime.compare import first_difference, warm_up
from eagle_runtime.huge_pages import restart_with_huge_pages
from eagle_runtime.modes import AUTO, PLAIN
from eagle_runtime.sampling import VerifyMode
from eagle_runtime.stats import HOST_PHASES, Stats

HERE = Path(__file__).parent
T = TypeVar("T")
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How tokens are chosen."""

    temperature: float
    """0 for greedy."""
    top_p: float | None
    verify_mode: VerifyMode

    def __str__(self) -> str:
        if not self.temperature:
            return "greedy"
        top_p = "" if self.top_p is None else f", top-p {self.top_p:g}"
        return f"temperature {self.temperature:g}{top_p}, {self.verify_mode}"

    def options(self, decoder: Decoder) -> StreamOptions:
        """For Session.generate; plain decoding has no tree to draw."""
        asked: StreamOptions = {"profile": decoder.profile, "lookup": decoder.lookup}
        if not self.temperature:
            return asked
        mode = "deterministic" if decoder.profile == PLAIN else self.verify_mode
        return {**asked, "temperature": self.temperature, "top_p": self.top_p, "verify_mode": mode}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """How trees are made."""

    profile: str
    lookup: bool | None
    """None for the profile's own choice."""

    def __str__(self) -> str:
        return self.profile + {None: "", True: "+lookup", False: "-lookup"}[self.lookup]


PLAINLY = Decoder(profile=PLAIN, lookup=None)
GREEDY = Setting(temperature=0.0, top_p=None, verify_mode="deterministic")


@dataclass(slots=True)
class Tally:
    """Both decoders over some prompts."""

    eagle: Stats = field(default_factory=Stats)
    plain: Stats = field(default_factory=Stats)
    lengths: list[float] = field(default_factory=list)
    identical: list[bool] = field(default_factory=list)

    def add(self, eagle: Stats, plain: Stats, *, identical: bool | None) -> None:
        """identical: None where both are not to say the same."""
        self.eagle.add(eagle)
        self.plain.add(plain)
        self.lengths.append(eagle.accepted_length)
        if identical is not None:
            self.identical.append(identical)

    def to_dict(self) -> dict[str, Any]:
        eagle, plain = self.eagle, self.plain
        return {
            "prompts": len(self.lengths),
            "identical_share": statistics.fmean(self.identical) if self.identical else None,
            "accepted_length": round(eagle.accepted_length, 4),
            "accepted_length_spread": round(statistics.pstdev(self.lengths), 4),
            "acceptance_rate": round(eagle.acceptance_rate, 4),
            "speedup": round(eagle.tokens_per_s / plain.tokens_per_s, 4) if plain.tokens_per_s else 0.0,
            "tokens_per_s": round(eagle.tokens_per_s, 2),
            "plain_tokens_per_s": round(plain.tokens_per_s, 2),
            "host_share": round(eagle.host_share, 4),
            "phases_ms": {phase: round(ms, 3) for phase, ms in eagle.phases_ms.items()},
            "rounds": eagle.line(),
        }


def read_prompts(path: Path) -> list[tuple[str, list[dict[str, str]]]]:
    """(category, messages) of each line: {"category", "messages"} or EAGLE's {"category", "turns"} (first turn)."""
    prompts = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise EagleError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            messages = item.get("messages") or [{"role": "user", "content": item["turns"][0]}]
            prompts.append((str(item.get("category", "all")), messages))
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):
            raise EagleError(
                f'{path}:{number} is no prompt; expected {{"category", "messages"}} or {{"category", "turns"}}'
            ) from None
    if not prompts:
        raise EagleError(f"{path} holds no prompts")
    return prompts


def check_plot(path: Path | None) -> None:
    """Raises EagleError where something is to be drawn and cannot be, before anything is measured."""
    if path is not None and find_spec("matplotlib") is None:
        raise EagleError("--plot needs matplotlib, which is not installed: pip install '.[bench]'")


def spread(prompts: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` of them, from all over the file."""
    count = min(limit or len(prompts), len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


@app.command()
def bench(
    bundle: Path,
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")] = HERE / "prompts.jsonl",
    profile: Annotated[str, typer.Option(help="Profiles, as 4,auto,8+lookup,auto-lookup.")] = AUTO,
    max_new_tokens: int = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, spread over the file.")] = None,
    threads: int | None = None,
    temperature: Annotated[str, typer.Option(help="Sample, both with the same seed; as 0.3,0.7,1. 0 is greedy.")] = "0",
    top_p: Annotated[float | None, typer.Option(help="Where tokens are sampled.")] = None,
    seed: int = 0,
    verify_mode: Annotated[
        str, typer.Option(help="Where tokens are sampled: deterministic, sampled (other text, same law), or both.")
    ] = "deterministic",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Benchmarks a bundle."""
    settings, decoders = settings_from_options(temperature, top_p, verify_mode), decoders_from_option(profile)
    chosen = spread(read_prompts(prompts), limit)
    console = Console(stderr=True, highlight=False)
    rows = [(setting, decoder) for setting in settings for decoder in decoders]
    with Session.open(bundle, threads=threads) as session:
        warm_up(session, session.encode(messages=chosen[0][1]), [PLAIN, *(decoder.profile for decoder in decoders)])
        tallies = {row: (Tally(), defaultdict[str, Tally](Tally)) for row in rows}
        for number, (category, messages) in enumerate(track(chosen, description=profile, console=console)):
            tokens = session.encode(messages=messages)
            for setting in settings:
                answers = in_turn(session, tokens, setting, decoders, number, max_new_tokens=max_new_tokens, seed=seed)
                plain = answers[PLAINLY]
                for decoder in decoders:
                    eagle = answers[decoder]
                    identical = None if setting.verify_mode == "sampled" else eagle.token_ids == plain.token_ids
                    if identical is False:
                        difference = first_difference(session, tokens, eagle.token_ids, plain.token_ids, eagle.sampling)
                        console.print(f"prompt {number}, {setting}, {decoder}: {difference}")
                    overall, categories = tallies[setting, decoder]
                    for tally in (overall, categories[category]):
                        tally.add(eagle.stats, plain.stats, identical=identical)
        exactness = session.engine.exactness.kind
    results: list[dict[str, Any]] = [
        {
            "profile": str(decoder),
            "setting": asdict(setting),
            "overall": overall.to_dict(),
            "categories": {name: tally.to_dict() for name, tally in sorted(categories.items())},
        }
        for (setting, decoder), (overall, categories) in tallies.items()
    ]
    if as_json:
        print(json.dumps({"exactness": exactness, "seed": seed, "results": results}))
        return
    title, (only, *more) = f"exactness {exactness}", results
    if more:
        names = [
            ", ".join([str(decoder)] * (len(decoders) > 1) + [str(setting)] * (len(settings) > 1) or [str(decoder)])
            for setting, decoder in rows
        ]
        print_table(title, [(name, with_worst(result)) for name, result in zip(names, results, strict=True)])
    else:
        print_table(f"{profile}, {title}, {settings[0]}", [*only["categories"].items(), ("overall", only["overall"])])
        print_phases(only["overall"]["phases_ms"])
        print(only["overall"]["rounds"])


def in_turn(
    session: Session,
    tokens: Sequence[int],
    setting: Setting,
    decoders: Sequence[Decoder],
    number: int,
    *,
    max_new_tokens: int,
    seed: int,
    ignore_eos: bool = False,
) -> dict[Decoder, Generation]:
    """The answers of plain decoding and of each decoder to prompt `number`, which says who is first."""
    turns = [PLAINLY, *(decoder for decoder in decoders if decoder != PLAINLY)]
    first = number % len(turns)
    answers = {}
    for decoder in turns[first:] + turns[:first]:
        session.reset()
        asked: StreamOptions = {
            "token_ids": tokens,
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "ignore_eos": ignore_eos,
            **setting.options(decoder),
        }
        answers[decoder] = session.generate(**asked)
    return answers


def with_worst(result: dict[str, Any]) -> dict[str, Any]:
    """A row over all prompts, and the category that it is slowest in."""
    worst = min(result["categories"].items(), key=lambda item: item[1]["speedup"])
    return {**result["overall"], "worst": f"{worst[1]['speedup']:.2f}x {worst[0]}"}


def decoders_from_option(text: str) -> list[Decoder]:
    """Profiles, with or without look-up. Raises EagleError on what is no name; a session refuses unknown ones."""
    decoders = []
    for name in text.split(","):
        profile, lookup = name.strip(), None
        for ending, value in (("+lookup", True), ("-lookup", False)):
            if profile.endswith(ending):
                profile, lookup = profile.removesuffix(ending), value
        if not profile:
            raise EagleError(f"--profile is {text!r}; expected names such as 4,auto,8+lookup")
        decoders.append(Decoder(profile=profile, lookup=lookup))
    return list(dict.fromkeys(decoders))


def settings_from_options(temperatures: str, top_p: float | None, verify_modes: str) -> list[Setting]:
    """Every temperature with every way of verifying; greedy knows one only. What else cannot be, a session refuses."""
    try:
        values = [float(text) for text in temperatures.split(",")]
    except ValueError:
        raise EagleError(f"--temperature is {temperatures!r}; expected numbers, such as 0.3,0.7,1") from None
    modes = verify_modes.split(",")
    if not any(values) and (top_p is not None or modes != ["deterministic"]):
        raise EagleError("--top-p and --verify-mode say how tokens are sampled: give a --temperature too")
    sampled = [Setting(temperature=t, top_p=top_p, verify_mode=cast(VerifyMode, m)) for t in values for m in modes]
    return list(dict.fromkeys(setting if setting.temperature else GREEDY for setting in sampled))


def print_table(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    table = Table(title=title)
    for column in (
        "",
        "prompts",
        "identical",
        "accepted length",
        "acceptance",
        "speed-up",
        "tok/s",
        "plain tok/s",
        "host",
        *(["worst category"] if "worst" in rows[0][1] else []),
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows:
        table.add_row(
            name,
            str(row["prompts"]),
            "-" if row["identical_share"] is None else f"{row['identical_share']:.0%}",
            f"{row['accepted_length']:.2f} ± {row['accepted_length_spread']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            f"{row['speedup']:.2f}x",
            f"{row['tokens_per_s']:.1f}",
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['host_share']:.1%}",
            *([row["worst"]] if "worst" in row else []),
            style="bold" if name == "overall" else "",
        )
    Console(highlight=False).print(table)


def print_phases(phases: dict[str, float]) -> None:
    total = sum(phases.values()) or 1.0
    shares = ", ".join(f"{phase} {ms:.2f} ms ({ms / total:.1%})" for phase, ms in phases.items())
    Console(highlight=False).print(f"a round: {shares}; on the host: {', '.join(HOST_PHASES)}")


if __name__ == "__main__":
    restart_with_huge_pages()
    run_command(app)
