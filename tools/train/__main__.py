"""Makes a draft head for a model, on one machine: `python -m tools.train {data,head,eval,ablations} --help`."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eagle_graphs import EagleError
from eagle_graphs.command_line import run_command
from eagle_runtime.huge_pages import restart_with_huge_pages

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


class Kind(str, Enum):  # noqa: UP042 - typer shows the values
    """Heads."""

    EAGLE1 = "eagle1"
    EAGLE3 = "eagle3"


class LabelKind(str, Enum):  # noqa: UP042
    """What a row should have said."""

    TARGET = "target"
    DATA = "data"


class Optimizer(str, Enum):  # noqa: UP042
    """Of the matrices between hidden states."""

    MUON = "muon"
    ADAMW = "adamw"


class Precision(str, Enum):  # noqa: UP042
    """Of the products with which the target writes."""

    INT8 = "int8"
    BF16 = "bf16"
    FP32 = "fp32"


Data = Annotated[list[Path], typer.Option("--data", help="Directory written by the data command; may be repeated.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Tokens = Annotated[int, typer.Option(min=1, help="Answer tokens.")]
Batch = Annotated[int, typer.Option(min=1, help="Answer tokens of a batch, padding counted.")]
DRAFT_VOCAB_HELP = "Tokens that an EAGLE-3 head can say: the most frequent ones."
DraftVocab = Annotated[int, typer.Option(min=1, help=DRAFT_VOCAB_HELP)]
Labels = Annotated[LabelKind, typer.Option(help="The target's distribution, or the data's token.")]
Bf16 = Annotated[bool, typer.Option("--bf16/--fp32", help="Products in bfloat16.")]
Cache = Annotated[bool, typer.Option(help="Keep the target's hidden states on disk, for more passes and heads.")]
Seed = Annotated[int, typer.Option(help="Of weights, order and noise.")]
Checks = Annotated[int, typer.Option(min=1, help="How often to measure on held-out conversations, and to save.")]
Unroll = Annotated[int, typer.Option(help="Steps of EAGLE-3's training-time test.")]
Optimizers = Annotated[Optimizer, typer.Option(help="Of matrices but the LM head, which has AdamW.")]
Lr = Annotated[float, typer.Option(help="Largest learning rate of AdamW.")]
MuonLr = Annotated[float, typer.Option(help="Largest learning rate of Muon.")]
Thin = Annotated[float, typer.Option(help="Share of the rows that go on to the next step.")]
Model = Annotated[str | None, typer.Option(help="Target.", show_default="the data's")]


@app.command()
def data(
    model: Annotated[str, typer.Option(help="Target: a Hugging Face directory, .gguf file or Hub id.")],
    out: Annotated[Path, typer.Option(help="Directory to write to, or to go on with.")],
    tokens: Tokens,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of prompts.", show_default="the target writes them")
    ] = None,
    starts: Annotated[
        Path | None, typer.Option(help="JSONL of beginnings of prompts.", show_default="the target begins them too")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 256,
    greedy: Annotated[float, typer.Option(help="Share of greedy answers.")] = 0.5,
    temperature: Annotated[float, typer.Option(help="Of the others.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Of the others, and of prompts.")] = 0.95,
    slots: Annotated[int, typer.Option(min=1, help="Conversations at once in each worker.")] = 96,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes.", show_default="one a core, 4 at most")] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Arithmetic of the writing.", show_default="int8 on a CPU, else bf16")
    ] = None,
    device: Device = "cpu",
    seed: Seed = 0,
) -> None:
    """Lets the target write prompts and answers."""
    from tools.train.data import DataOptions, make_data

    on_cpu = device == "cpu"
    options = DataOptions(
        model=model,
        out=out,
        tokens=tokens,
        prompts=prompts,
        starts=starts,
        answer_tokens=answer_tokens,
        greedy=greedy,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        slots=slots,
        workers=workers or (min(4, os.cpu_count() or 1) if on_cpu else 1),
        precision=precision.value if precision else ("int8" if on_cpu else "bf16"),
        device=device,
    )
    make_data(options, _console())


@app.command()
def head(
    data: Data,
    out: Annotated[Path, typer.Option(help="Directory of the head; training goes on with what is there.")],
    kind: Kind = Kind.EAGLE3,
    model: Model = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="To train on.", show_default="twice the data")] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(min=1, help=DRAFT_VOCAB_HELP, show_default="8192; with --from, the head's own tokens"),
    ] = None,
    taps: Annotated[str | None, typer.Option(help="Hidden states that EAGLE-3 reads, as 2,15,27.")] = None,
    init_from_target_layer: Annotated[
        bool, typer.Option("--init-from-target-layer", help="Begin with the target's last layer.")
    ] = False,
    known: Annotated[str | None, typer.Option("--from", help="Go on from this head, with its kind and taps.")] = None,
    unroll: Unroll = 5,
    ramp: Annotated[float, typer.Option(help="Share of the run in which the steps rise from one.")] = 0.4,
    decay: Annotated[float, typer.Option(help="Weight of a step against the one before.")] = 1.0,
    thin: Thin = 0.8,
    labels: Labels = LabelKind.TARGET,
    noise: Annotated[float, typer.Option(help="Half-width of the noise on EAGLE-1's features.")] = 0.1,
    batch: Batch = 2048,
    optimizer: Optimizers = Optimizer.MUON,
    lr: Lr = 1e-3,
    muon_lr: MuonLr = 0.02,
    warmup: Annotated[float, typer.Option(help="Share of the run.")] = 0.03,
    weight_decay: float = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    bf16: Bf16 = True,
    cache: Cache = True,
    device: Device = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Seed = 0,
    checks: Checks = 20,
) -> None:
    """Trains a head."""
    import torch

    from tools.train.answers import read_answers
    from tools.train.head import HeadOptions, train_head
    from tools.train.options import Options

    if threads is not None:
        torch.set_num_threads(threads)
    training = Options(
        tokens=tokens or 2 * sum(len(answer.answer) - 1 for each in data for answer in read_answers(each)),
        batch=batch,
        optimizer=optimizer.value,
        lr=lr,
        muon_lr=muon_lr,
        warmup=warmup,
        weight_decay=weight_decay,
        clip=clip,
        unroll=unroll,
        ramp=ramp,
        decay=decay,
        thin=thin,
        noise=noise,
        labels=labels.value,
        bf16=bf16,
        seed=seed,
        checks=checks,
    )
    options = HeadOptions(
        kind=kind.value,
        data=tuple(data),
        out=out,
        model=model,
        draft_vocab=draft_vocab,
        taps=_numbers(taps),
        init_from_target_layer=init_from_target_layer,
        known=known,
        cache=cache,
        device=device,
        training=training,
    )
    train_head(options, _console())


@app.command("eval")
def evaluate(
    head: Annotated[str, typer.Option(help="A head that eagle-export reads: a directory or a Hub id.")],
    model: Annotated[str, typer.Option(help="Its target.")],
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts with categories.")] = Path("tools/prompts.jsonl"),
    profiles: Annotated[str, typer.Option(help="Sizes of dynamic trees; 60:8 has eight levels.")] = "4,8,16,30,60",
    static: Annotated[bool, typer.Option("--static", help="EAGLE-1's tree of 25 nodes too.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, spread over the file.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Directory for the report and the plot.")] = None,
) -> None:
    """Measures a head on the target's greedy answers to prompts."""
    from tools.train.evaluate import EvalOptions
    from tools.train.evaluate import evaluate as run

    options = EvalOptions(
        head=head,
        model=model,
        prompts=prompts,
        profiles=profiles,
        static=static,
        limit=limit,
        new_tokens=new_tokens,
        out=out,
    )
    run(options, _console())


@app.command()
def ablations(
    data: Data,
    out: Annotated[Path, typer.Option(help="Directory for the heads.")],
    tokens: Tokens,
    model: Model = None,
    draft_vocab: DraftVocab = 8192,
    unroll: Unroll = 5,
    thin: Thin = 0.8,
    labels: Labels = LabelKind.TARGET,
    batch: Batch = 2048,
    optimizer: Optimizers = Optimizer.MUON,
    lr: Lr = 1e-3,
    muon_lr: MuonLr = 0.02,
    bf16: Bf16 = True,
    cache: Cache = True,
    device: Device = "cpu",
    seed: Seed = 0,
    checks: Checks = 20,
) -> None:
    """Trains heads that lack a part of EAGLE, each on as many tokens, and compares them."""
    from tools.train.ablations import AblationOptions, run_ablations
    from tools.train.head import HeadOptions
    from tools.train.options import Options

    training = Options(
        tokens=tokens,
        batch=batch,
        optimizer=optimizer.value,
        lr=lr,
        muon_lr=muon_lr,
        unroll=unroll,
        thin=thin,
        labels=labels.value,
        bf16=bf16,
        seed=seed,
        checks=checks,
    )
    options = HeadOptions(
        kind="eagle3",
        data=tuple(data),
        out=out,
        model=model,
        draft_vocab=draft_vocab,
        taps=None,
        init_from_target_layer=False,
        known=None,
        cache=cache,
        device=device,
        training=training,
    )
    run_ablations(AblationOptions(head=options, out=out), _console())


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(item) for item in text.split(","))
    except ValueError:
        raise EagleError(f"--taps are layer numbers separated by commas, as in 2,15,27; found {text!r}") from None


def _console() -> Console:
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return Console(stderr=True)


def main() -> None:
    """The command; a user's mistake gives one line and status 2."""
    run_command(app)


if __name__ == "__main__":
    restart_with_huge_pages()
    main()
