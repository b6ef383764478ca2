"""eagle-run: chat with a bundle, answer one prompt, or compare EAGLE with plain decoding."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from eagle_graphs import EagleError
from eagle_graphs.command_line import refuse, run_command
from eagle_runtime.answer import Generation, StreamOptions
from eagle_runtime.chat import messages_from_json
from eagle_runtime.chat_loop import RoundPrinter, chat, ctrl_c_cancels
from eagle_runtime.compare import Comparison, plain_beside, warm_up
from eagle_runtime.modes import AUTO, PLAIN
from eagle_runtime.session import Session
from eagle_runtime.show_costs import print_costs
from eagle_runtime.token_options import token_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_INTERRUPTED = 130
_MOST_THREADS = 1024  # ONNX Runtime starts as many as it is told, however long that takes


@app.command()
def run(
    bundle: Annotated[Path, typer.Argument(help="Bundle made by eagle-export.")],
    stdin: Annotated[str | None, typer.Argument(metavar="-", help="'-' reads the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this message ('-': standard input) and end.")] = None,
    messages: Annotated[str | None, typer.Option(help="Answer this conversation: a JSON file, or '-'.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    profile: Annotated[str, typer.Option(help="Nodes of the tree to verify, 'auto', 'lookup' or 'plain'.")] = AUTO,
    lookup: Annotated[
        bool | None,
        typer.Option("--lookup/--no-lookup", help="Let the text so far propose tokens.", show_default="with 'auto'"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Where an answer is cut.")] = 512,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Sample at this.", show_default="greedy")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one's.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: tokens seen become less likely.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Off a logit for each use in the answer.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Off a logit once used in the answer.")] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(help="No n-gram of this size twice.")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="No end-of-sequence token before.")] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN=BIAS", help="Add to the logit of a token (an id or a text); may be repeated."),
    ] = None,
    suppress_token: Annotated[
        list[str] | None, typer.Option(metavar="TOKEN", help="Never draw this token (an id or a text); likewise.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Text that an answer must not hold; likewise.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws.", show_default="a new one")] = None,
    verify_mode: Annotated[str | None, typer.Option(help="'deterministic' or 'sampled' tree.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: tokens' log-probabilities, and k best.")] = None,
    device: Annotated[str, typer.Option(help="'cpu' or 'cuda'.")] = "cpu",
    kernels: Annotated[str, typer.Option(help="'native' or 'stock' (ONNX Runtime's), where it has both.")] = AUTO,
    threads: Annotated[int | None, typer.Option(help="Threads to compute with.", show_default="one a core")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer plainly too, and compare.")] = False,
    show_tree: Annotated[bool, typer.Option("--show-tree", help="Draw the tree of every round.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Measure what trees cost here, for 'auto', and end.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file of the bundle first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Runs a bundle. Without a prompt it is a chat."""
    if stdin not in (None, "-"):
        raise EagleError(f"the second argument is {stdin!r}; it may only be '-'. Give a prompt with --prompt")
    source = "-" if stdin == "-" and prompt is None and messages is None else prompt
    if sum(value is not None for value in (source, messages)) + (stdin == "-" and source != "-") > 1:
        raise EagleError("give one of --prompt, --messages and '-'")
    if raw and messages is not None:
        raise EagleError("--raw continues a text as it is; it does not go with --messages")
    if threads is not None and threads > _MOST_THREADS:
        raise EagleError(f"--threads is {threads}; expected at most {_MOST_THREADS}")
    if logprobs is not None and not as_json:
        raise EagleError("--logprobs goes with --json")
    if compare and verify_mode == "sampled":
        raise EagleError("--compare expects the same text, but --verify-mode sampled gives another one of the same law")
    if tune and (source is not None or messages is not None):
        raise EagleError("--tune measures and ends: give no prompt")
    given_options = {
        "lookup": lookup,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size,
        "min_new_tokens": min_new_tokens,
        "seed": seed,
        "verify_mode": verify_mode,
        "logprobs": logprobs,
    }
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_strings": stop or [], "ignore_eos": ignore_eos}
    options |= {name: value for name, value in given_options.items() if value is not None}
    opened = AUTO if compare and profile == PLAIN else profile
    given = _read_prompt(source, messages, raw=raw)
    with Session.open(
        bundle, profile=opened, threads=threads, kernels=kernels, device=device, verify=verify
    ) as session:
        if session.fallback is not None:
            print(f"note: {' '.join(session.fallback.split())}", file=sys.stderr)
        options |= token_options(
            session.tokenizer,
            logit_bias=logit_bias or (),
            suppress_token=suppress_token or (),
            bad_word=bad_word or (),
        )
        console = Console(highlight=False)
        if tune:
            print_costs(console, session.tune())
            return
        if given is None:
            if compare or as_json or raw:
                raise EagleError("--compare, --json and --raw need a prompt: add --prompt, --messages or '-'")
            chat(session, console, cast(StreamOptions, options), trees=show_tree)
            return
        tokens = session.encode(**given)
        if compare:
            warm_up(session, tokens, [profile, PLAIN])
        answer = _answer(session, tokens, profile, options, quiet=as_json, trees=show_tree and not as_json)
        comparison = None
        if compare and answer.finish_reason != "cancelled":
            comparison = plain_beside(session, answer, tokens, **options)
        if as_json:
            print(json.dumps(_as_json(answer, comparison)))
        elif comparison is not None:
            _print_comparison(session, comparison)
    if answer.finish_reason == "cancelled":
        sys.exit(_INTERRUPTED)


def _read_prompt(prompt: str | None, messages: str | None, *, raw: bool) -> dict[str, Any] | None:
    """Arguments for Session.encode; None where nothing was asked."""
    if messages is not None:
        where = "standard input" if messages == "-" else messages
        return {"messages": messages_from_json(_read(messages), where)}
    if prompt is None:
        return None
    text = _read(prompt) if prompt == "-" else prompt
    try:
        text.encode()
    except UnicodeEncodeError:
        raise EagleError("the prompt is not UTF-8 text") from None
    if not text.strip():
        raise EagleError("the prompt is empty: give some text")
    return {"prompt": text} if raw else {"messages": [{"role": "user", "content": text.strip()}]}


def _read(where: str) -> str:
    if where == "-" and sys.stdin is None:
        raise EagleError("standard input is closed: give the prompt in it, or with --prompt")
    try:
        return sys.stdin.read() if where == "-" else Path(where).read_text("utf-8")
    except OSError as error:
        raise EagleError(f"{where} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EagleError(f"{'standard input' if where == '-' else where} is not UTF-8 text") from None


def _answer(
    session: Session, tokens: list[int], profile: str, options: dict[str, Any], *, quiet: bool, trees: bool
) -> Generation:
    rounds = RoundPrinter(session, Console(highlight=False)) if trees else None
    with ctrl_c_cancels(session):
        for piece in session.stream(token_ids=tokens, profile=profile, on_round=rounds, **options):
            if not quiet and not trees:
                print(piece, end="", flush=True)
    assert session.last is not None
    if not quiet:
        print(session.last.text if trees else "")
    return session.last


def _print_comparison(session: Session, comparison: Comparison) -> None:
    print()
    print(session.engine.exactness.sentence())
    if comparison.difference is not None:
        print(f"first difference at {comparison.difference}")
    print(comparison.line())
    print(comparison.eagle.stats.line())


def _as_json(answer: Generation, comparison: Comparison | None) -> dict[str, Any]:
    data = _generation_as_json(answer)
    if comparison is not None:
        data |= {
            "plain": _generation_as_json(comparison.plain),
            "identical": comparison.identical,
            "speedup": round(comparison.speedup, 4),
        }
        if comparison.difference is not None:
            data["difference"] = str(comparison.difference)
    return data


def _generation_as_json(answer: Generation) -> dict[str, Any]:
    data: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stats": answer.stats.to_dict(),
    }
    if not answer.sampling.greedy:
        data["seed"] = answer.sampling.seed
    if answer.logprobs is not None:
        data["logprobs"] = [dataclasses.asdict(entry) for entry in answer.logprobs]
    return data


def main() -> None:
    """The command; a user's mistake gives one line and status 2."""
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace")):  # whatever the locale
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        run_command(app)
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            refuse(error.strerror or str(error))
        refuse("there is not enough memory: free some, or export with a smaller --capacity")
