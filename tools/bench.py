"""EAGLE against plain decoding of the same bundle, over a file of prompts.

    python tools/bench.py BUNDLE [--prompts FILE.jsonl] [--profile auto] [--temperature 0.7 --top-p 0.9] [--json]

Both alternate prompt by prompt, each first in turn, so that a noisy machine is unfair to neither: read
the ratios. The speed-up is the ratio of summed decode times, the accepted length is counted over all
rounds (definitions: eagle_runtime/stats.py).
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle_graphs import EagleError
from eagle_runtime import Session
from eagle_runtime.answer import StreamOptions
from eagle_runtime.compare import first_difference, warm_up
from eagle_runtime.huge_pages import restart_with_huge_pages
from eagle_runtime.session import AUTO, PLAIN
from eagle_runtime.stats import HOST_PHASES, Stats

HERE = Path(__file__).parent
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(slots=True)
class Tally:
    """Both decoders over some prompts."""

    eagle: Stats = field(default_factory=Stats)
    plain: Stats = field(default_factory=Stats)
    lengths: list[float] = field(default_factory=list)
    identical: int = 0

    def add(self, eagle: Stats, plain: Stats, *, identical: bool) -> None:
        self.eagle.add(eagle)
        self.plain.add(plain)
        self.lengths.append(eagle.accepted_length)
        self.identical += identical

    def to_dict(self) -> dict[str, Any]:
        eagle, plain = self.eagle, self.plain
        return {
            "prompts": len(self.lengths),
            "identical_share": self.identical / len(self.lengths),
            "accepted_length": round(eagle.accepted_length, 4),
            "accepted_length_spread": round(statistics.pstdev(self.lengths), 4),
            "acceptance_rate": round(eagle.acceptance_rate, 4),
            "speedup": round(plain.decode_s / eagle.decode_s, 4) if eagle.decode_s else 0.0,
            "tokens_per_s": round(eagle.tokens_per_s, 2),
            "plain_tokens_per_s": round(plain.tokens_per_s, 2),
            "host_share": round(eagle.host_share, 4),
            "phases_ms": {phase: round(ms, 3) for phase, ms in eagle.phases_ms.items()},
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


@app.command()
def bench(
    bundle: Path,
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")] = HERE / "prompts.jsonl",
    profile: Annotated[str, typer.Option(help="Nodes of the tree, or 'auto'.")] = AUTO,
    max_new_tokens: int = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, spread over the file.")] = None,
    threads: int | None = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sample, both with the same seed.  [default: greedy]")
    ] = None,
    top_p: float | None = None,
    seed: int = 0,
    verify_mode: Annotated[str, typer.Option(help="'sampled': other text, of the same law.")] = "deterministic",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Benchmarks a bundle."""
    chosen = read_prompts(prompts)
    if limit is not None and limit < len(chosen):
        chosen = [chosen[i * len(chosen) // limit] for i in range(limit)]
    console = Console(stderr=True, highlight=False)
    overall, categories = Tally(), dict[str, Tally]()
    options: StreamOptions = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    with Session.open(bundle, profile=profile, threads=threads) as session:
        warm_up(session, session.encode(messages=chosen[0][1]), [profile, PLAIN])
        for number, (category, messages) in enumerate(track(chosen, description=profile, console=console)):
            tokens = session.encode(messages=messages)
            order = (profile, PLAIN) if number % 2 == 0 else (PLAIN, profile)
            answers = {}
            for name in order:
                session.reset()
                mode = verify_mode if name == profile else "deterministic"
                answers[name] = session.generate(token_ids=tokens, profile=name, verify_mode=mode, **options)
            eagle, plain = answers[profile], answers[PLAIN]
            identical = eagle.token_ids == plain.token_ids
            if not identical and verify_mode == "deterministic":
                difference = first_difference(session, tokens, eagle.token_ids, plain.token_ids, eagle.sampling)
                console.print(f"prompt {number}: {difference}")
            for tally in (overall, categories.setdefault(category, Tally())):
                tally.add(eagle.stats, plain.stats, identical=identical)
        exactness = session.engine.exactness.kind
    result = {
        "profile": profile,
        "exactness": exactness,
        "sampling": {"temperature": temperature, "top_p": top_p, "seed": seed, "verify_mode": verify_mode},
        "overall": overall.to_dict(),
        "categories": {name: tally.to_dict() for name, tally in sorted(categories.items())},
    }
    if as_json:
        print(json.dumps(result))
    else:
        print_table(result)


def print_table(result: dict[str, Any]) -> None:
    table = Table(title=f"profile {result['profile']}, exactness {result['exactness']}")
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
    ):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in [*result["categories"].items(), ("overall", result["overall"])]:
        table.add_row(
            name,
            str(row["prompts"]),
            f"{row['identical_share']:.0%}",
            f"{row['accepted_length']:.2f} ± {row['accepted_length_spread']:.2f}",
            f"{row['acceptance_rate']:.0%}",
            f"{row['speedup']:.2f}x",
            f"{row['tokens_per_s']:.1f}",
            f"{row['plain_tokens_per_s']:.1f}",
            f"{row['host_share']:.1%}",
            style="bold" if name == "overall" else "",
        )
    console = Console(highlight=False)
    console.print(table)
    phases = result["overall"]["phases_ms"]
    total = sum(phases.values()) or 1.0
    shares = ", ".join(f"{phase} {ms:.2f} ms ({ms / total:.1%})" for phase, ms in phases.items())
    console.print(f"a round: {shares}; on the host: {', '.join(HOST_PHASES)}")


if __name__ == "__main__":
    restart_with_huge_pages()
    try:
        app()
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
