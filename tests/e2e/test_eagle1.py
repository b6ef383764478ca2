"""An EAGLE-1 head from checkpoint to text, with dynamic trees and with static ones: plain decoding's tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from eagle_graphs import EagleError, Tree
from eagle_graphs.manifest import manifest_from_json
from eagle_graphs.profiles import STATIC_PATHS
from eagle_runtime import Session
from eagle_runtime.generate import Round
from tests.commands import assert_refused, eagle_export
from tests.conftest import export
from tests.heads import TinyHead
from tests.models import HIDDEN, LAYERS, VOCAB
from tests.overfit import calibration_answers, overfit_head
from tests.reference.variants import VariantHead

HEAD = TinyHead(family="safeailab", kind="eagle1", biases=("fc", "qkv"), draft_vocab=VOCAB, own_embedding=True)
TOKENS = 40
PROMPTS = [[0, 2 + i, 40 + 7 * i, 99, 5 * i + 3] for i in range(4)]
OWN_TREE = [[0], [1], [0, 0], [0, 2], [0, 0, 0]]


@dataclass(frozen=True, kw_only=True)
class Bundles:
    model: LlamaForCausalLM
    head: Path
    dynamic: Path
    static: Path
    own: Path
    known: list[list[int]]
    """Prompts whose answers the head was trained on."""


@pytest.fixture(scope="module")
def bundles(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    place = tmp_path_factory.mktemp("eagle1")
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    answers = calibration_answers(model)
    overfit_head(place / "head", HEAD, model, answers)
    (place / "tree.json").write_text(json.dumps(OWN_TREE))
    sizes = ("--capacity", "400", "--prefill-chunk", "32")
    export(tiny_target, place / "head", place / "dynamic", *sizes, "--profiles", "4,12")
    export(tiny_target, place / "head", place / "static", *sizes, "--tree", "static")
    export(tiny_target, place / "head", place / "own", *sizes, "--tree", str(place / "tree.json"))
    return Bundles(
        model=model,
        head=place / "head",
        dynamic=place / "dynamic",
        static=place / "static",
        own=place / "own",
        known=[answer[: len(answer) - TOKENS].tolist() for answer in answers[:4]],
    )


@pytest.mark.parametrize(("name", "profiles"), [("dynamic", ("4", "12")), ("static", ("26",)), ("own", ("6",))])
def test_the_text_is_plain_decoding_s(bundles: Bundles, name: str, profiles: tuple[str, ...]) -> None:
    directory = getattr(bundles, name)
    for profile in (*profiles, "auto"):
        lengths = []
        with Session.open(directory, profile=profile, threads=1) as session:
            for prompt in [*PROMPTS, *bundles.known]:
                eagle = session.generate(token_ids=prompt, max_new_tokens=TOKENS, ignore_eos=True)
                session.reset()
                plain = session.generate(token_ids=prompt, max_new_tokens=TOKENS, ignore_eos=True, profile="plain")
                assert eagle.token_ids == plain.token_ids
                lengths.append(eagle.stats.accepted_length)
        if profile != "auto":  # which may find that drafting does not pay here
            assert max(lengths) > 2, lengths  # it knows these answers


def test_the_manifest_names_kind_taps_and_paths(bundles: Bundles) -> None:
    dynamic, static, own = (
        manifest_from_json((directory / "manifest.json").read_text())
        for directory in (bundles.dynamic, bundles.static, bundles.own)
    )
    for manifest in (dynamic, static, own):
        head = manifest.head
        assert (head.kind, head.layout, head.taps, head.position_offset) == ("eagle1", "safeailab-eagle1", (LAYERS,), 0)
        assert head.hidden_size == HIDDEN
        assert head.draft_vocab_size == VOCAB
    assert all(profile.paths == () for profile in dynamic.profiles)
    assert [set(profile.paths) for profile in static.profiles] == [set(STATIC_PATHS)]
    assert [set(profile.paths) for profile in own.profiles] == [set(map(tuple, OWN_TREE))]
    assert static.head.top_k == 4
    assert own.head.top_k == 3


def test_the_target_s_lm_head_is_stored_once(bundles: Bundles) -> None:
    tensors = [*bundles.model.parameters(), *(t for n, t in _tensors(bundles.head).items() if "embed" not in n)]
    needed = 4 * sum(tensor.numel() for tensor in tensors)
    own_embedding = 4 * VOCAB * HIDDEN
    (weights,) = bundles.static.glob("*/weights.bin")
    assert weights.stat().st_size < needed + own_embedding + 4096 * (len(tensors) + 8)
    assert weights.stat().st_size < needed + 2 * own_embedding


@torch.inference_mode()
@pytest.mark.parametrize("name", ["static", "own"])
def test_a_static_tree_holds_the_reference_s_tokens(bundles: Bundles, name: str) -> None:
    rounds: list[Round] = []
    prompt = bundles.known[0]
    with Session.open(getattr(bundles, name), profile="26" if name == "static" else "6", threads=1) as session:
        paths = session.bundle.manifest.profiles[0].paths
        session.generate(token_ids=prompt, max_new_tokens=12, ignore_eos=True, on_round=rounds.append)
    reference = VariantHead(
        truth=HEAD.truth(),
        tensors=_tensors(bundles.head),
        target_embedding=bundles.model.get_input_embeddings().weight,
        target_lm_head=bundles.model.get_output_embeddings().weight,
    )
    text = [*prompt, int(rounds[0].tree.tokens[0])]
    for done in rounds[:3]:
        check_static_tree(done.tree, paths, text, reference, bundles.model)
        text += done.kept


def check_static_tree(
    tree: Tree, paths: tuple[tuple[int, ...], ...], text: list[int], reference: VariantHead, model: LlamaForCausalLM
) -> None:
    """Every node is its parent's child of the path's last rank; each path is drafted afresh."""
    features = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[LAYERS][0]
    rows = len(features)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    first, first_probs, cache = reference.forward(
        torch.tensor(text[1:]), features, torch.arange(rows), causal, reference.empty_cache()
    )
    assert tree.tokens[0] == text[-1]
    assert len(tree) == len(paths) + 1
    for row, path in enumerate(paths, start=1):
        hidden, log_probs, past, seen, value = first[-1:], first_probs[-1], cache, rows, 0.0
        for depth, rank in enumerate(path):
            best = log_probs.sort(descending=True)
            token, value = int(best.indices[rank]), value + float(best.values[rank])
            if depth + 1 < len(path):
                visible = torch.ones(1, seen + 1, dtype=torch.bool)
                position = torch.tensor([rows + depth])
                hidden, out, past = reference.forward(torch.tensor([token]), hidden, position, visible, past)
                log_probs, seen = out[0], seen + 1
        assert tree.tokens[row] == token
        assert tree.values[row] == pytest.approx(value, abs=1e-3)
        assert tree.path_to(row) == [0, *(paths.index(path[: i + 1]) + 1 for i in range(len(path)))]


def test_trees_that_cannot_be(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> None:
    (tmp_path / "orphan.json").write_text("[[0], [1, 0]]")
    for options, words in (
        (["--tree", tmp_path / "nowhere.json"], "not 'dynamic', not 'static', and no file of paths"),
        (["--tree", tmp_path / "orphan.json"], "names the path [1, 0] without its parent [1]"),
        (["--tree", "static", "--profiles", "4"], "a static tree has its own: leave one of them out"),
    ):
        outcome = eagle_export("--model", tiny_target, "--draft", tiny_head, "--out", tmp_path / "out", *options)
        assert_refused(outcome, words)


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_a_static_tree_is_not_sampled(bundles: Bundles) -> None:
    with Session.open(bundles.static, profile="26", threads=1) as session:
        with pytest.raises(EagleError, match="the profile's tree is static"):
            session.stream(token_ids=[2, 3], temperature=1.0, verify_mode="sampled")
        tree = session.generate(token_ids=[2, 3], temperature=1.0, seed=1, max_new_tokens=8, ignore_eos=True)
        plain = session.generate(
            token_ids=[2, 3], temperature=1.0, seed=1, max_new_tokens=8, ignore_eos=True, profile="plain"
        )
    assert tree.token_ids == plain.token_ids
