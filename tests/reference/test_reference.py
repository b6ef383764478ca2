"""The reference is itself checked: against Hugging Face's parts, against plain decoding, with scripted heads."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.reference.head import ReferenceHead
from tests.reference.loop import (
    ROOT,
    Candidate,
    ReferenceEagle,
    ReferenceTree,
    accept,
    best,
    causal,
    cut,
    plain_greedy,
    rerank,
)

HIDDEN, VOCAB, DRAFT_VOCAB = 32, 64, 48
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TAPS = (1, 2, 3)
PROMPT = [3, 14, 15, 9, 26, 5, 35]
SHAPES = {  # by name: nodes, top_k, depth
    "chain": (4, 1, 3),
    "one level": (9, 8, 1),
    "small": (8, 4, 3),
    "bushy": (40, 16, 2),
    "all drafted": (4 + 2 * 16 + 1, 4, 3),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, and on a busy machine the threads' barriers cost minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        initializer_range=0.3,  # wide enough for choices that are clear and text that is not one token repeated
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def head_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint in SafeAILab's layout, in half precision as they are published."""
    torch.manual_seed(1)
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (wide, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (narrow, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (narrow, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, wide),
        "midlayer.mlp.gate_proj": (48, HIDDEN),
        "midlayer.mlp.up_proj": (48, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 48),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
        "midlayer.hidden_norm": (HIDDEN,),
        "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.post_attention_layernorm": (HIDDEN,),
        "norm": (HIDDEN,),
    }
    tensors = {f"{name}.weight": (0.3 * torch.randn(shape)).half() for name, shape in shapes.items()}
    chosen = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.isin(torch.arange(VOCAB), chosen)
    config = {
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
    directory = tmp_path_factory.mktemp("head")
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def head(head_directory: Path, target: LlamaForCausalLM) -> ReferenceHead:
    return ReferenceHead.load(head_directory, target)


# The head


@torch.inference_mode()
def test_head_equals_one_built_of_hugging_faces_parts(head: ReferenceHead, target: LlamaForCausalLM) -> None:
    def loaded(module: torch.nn.Module, name: str) -> torch.nn.Module:
        prefix = f"{name}."
        module.load_state_dict({k.removeprefix(prefix): v for k, v in head.weights.items() if k.startswith(prefix)})
        return module

    def norm(name: str) -> torch.nn.Module:
        return loaded(LlamaRMSNorm(HIDDEN, head.eps), name)

    config = LlamaConfig(
        hidden_size=2 * HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_parameters={"rope_type": "default", "rope_theta": head.rope_theta},
        attn_implementation="sdpa",
    )
    attention = LlamaAttention(config, layer_idx=0)
    attention.o_proj = torch.nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
    loaded(attention, "midlayer.self_attn")
    mlp = loaded(LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=48)), "midlayer.mlp")

    torch.manual_seed(2)
    rows = 11
    tokens, features = torch.randint(VOCAB, (rows,)), torch.randn(rows, 3 * HIDDEN)
    hidden = features @ head.weights["fc.weight"].T
    embedded = target.model.embed_tokens(tokens)
    x = torch.cat((norm("midlayer.input_layernorm")(embedded), norm("midlayer.hidden_norm")(hidden)), dim=-1)
    rotary = LlamaRotaryEmbedding(config)(x[None], torch.arange(rows)[None])
    hidden = hidden + attention(x[None], rotary, causal(0, rows)[None, None])[0][0]
    hidden = hidden + mlp(norm("midlayer.post_attention_layernorm")(hidden))
    log_probs = (norm("norm")(hidden) @ head.weights["lm_head.weight"].T).log_softmax(dim=-1)

    found, _ = head.forward(tokens, head.fuse(features), torch.arange(rows), causal(0, rows), head.empty_cache())
    torch.testing.assert_close(found, hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.log_probs(found), log_probs, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_a_row_of_the_head_depends_on_its_own_path_alone(head: ReferenceHead) -> None:
    torch.manual_seed(3)
    tokens, hidden = torch.randint(VOCAB, (5,)), torch.randn(5, HIDDEN)
    _, past = head.forward(tokens[:2], hidden[:2], torch.arange(2), causal(0, 2), head.empty_cache())
    # Rows 2 and 3 are siblings; row 4 hangs below row 2.
    visible = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1]]).bool()
    in_tree, _ = head.forward(tokens[2:], hidden[2:], torch.tensor([2, 2, 3]), visible, past)
    for path in ([2], [3], [2, 4]):
        rows = [0, 1, *path]
        alone, _ = head.forward(
            tokens[rows], hidden[rows], torch.arange(len(rows)), causal(0, len(rows)), head.empty_cache()
        )
        torch.testing.assert_close(in_tree[path[-1] - 2], alone[-1], rtol=1e-5, atol=1e-5)


def test_d2t_holds_offsets(head: ReferenceHead) -> None:
    ids = head.target_ids(torch.arange(DRAFT_VOCAB))
    assert ids.tolist() == head.weights["t2d"].nonzero().flatten().tolist()


# The tree


def test_ties_go_to_the_earlier_candidate() -> None:
    candidates = [Candidate(1, ROOT, -1.0), Candidate(2, ROOT, -1.0), Candidate(3, 1, -1.0), Candidate(4, 0, -0.5)]
    assert best(candidates, range(4), 3) == [3, 0, 1]


def test_rerank_is_depth_first_with_the_better_sibling_first() -> None:
    candidates = [
        Candidate(10, ROOT, -0.7),
        Candidate(11, ROOT, -0.6),
        Candidate(12, 0, -0.8),
        Candidate(13, 0, -2.0),
        Candidate(14, 1, -0.9),
        Candidate(15, 1, -0.65),
    ]
    tree = rerank(candidates, root=9, nodes=6)
    assert tree.tokens == [9, 11, 15, 14, 10, 12]
    assert tree.parents == [ROOT, 0, 1, 1, 0, 4]
    assert tree.path_to(3) == [0, 1, 3]


def test_rerank_refuses_an_orphan() -> None:
    with pytest.raises(AssertionError, match="without its parent"):
        rerank([Candidate(1, ROOT, -2.0), Candidate(2, 0, -1.0)], root=0, nodes=2)


def test_accept_follows_the_target_until_no_child_fits() -> None:
    tree = ReferenceTree(tokens=[9, 11, 15, 14, 10, 12], parents=[ROOT, 0, 1, 1, 0, 4])
    assert accept(tree, [11, 14, 0, 10, 0, 0]) == ([0, 1, 3], 10)  # 10 is a node, but not below row 3
    assert accept(tree, [12, 0, 0, 0, 0, 0]) == ([0], 12)  # 12 is a node, but not below the root


@pytest.mark.parametrize(
    ("limit", "eos", "expected"),
    [(9, (), [5, 6, 7, 6]), (3, (), [5, 6, 7]), (9, (6,), [5, 6]), (1, (6,), [5]), (0, (), [])],
)
def test_cut(limit: int, eos: tuple[int, ...], expected: list[int]) -> None:
    assert cut([5, 6, 7, 6], limit, eos) == expected


# Drafting


@torch.inference_mode()
def test_levels_equal_paths_drafted_alone(target: LlamaForCausalLM, head: ReferenceHead) -> None:
    top_k, depth, rows = 4, 3, 6
    torch.manual_seed(4)
    features, advanced = torch.randn(rows, 3 * HIDDEN), torch.randint(VOCAB, (rows,)).tolist()
    eagle = ReferenceEagle(target, head, TAPS)
    hidden, past = eagle.extend(features, advanced, head.empty_cache())
    candidates = eagle.levels(hidden, past, top_k, depth)

    def draft_alone(node: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], float, int]:
        """Feature, cache, value and depth of a node whose path is fed one token at a time."""
        if node == ROOT:
            return hidden, past, 0.0, 0
        parent_hidden, cache, value, level = draft_alone(candidates[node].parent)
        token = candidates[node].token
        value += head.log_probs(parent_hidden)[0, head.target_ids(torch.arange(DRAFT_VOCAB)) == token].item()
        position = torch.tensor([rows + level])
        own, cache = head.forward(torch.tensor([token]), parent_hidden, position, causal(rows + level, 1), cache)
        return own, cache, value, level + 1

    alone = [draft_alone(node) for node in range(len(candidates))]
    assert [candidate.value for candidate in candidates] == pytest.approx([value for *_, value, _ in alone], abs=1e-4)
    levels = [level for *_, level in alone]
    assert levels == [1] * top_k + [2] * top_k**2 + [3] * top_k**2
    for level in range(depth):
        among = [ROOT] if level == 0 else best(candidates, [n for n, at in enumerate(levels) if at == level], top_k)
        parents = [candidate.parent for candidate, at in zip(candidates, levels, strict=True) if at == level + 1]
        assert parents == [node for node in among for _ in range(top_k)]
    for node in {candidate.parent for candidate in candidates}:
        children = [candidate for candidate in candidates if candidate.parent == node]
        parent_hidden = draft_alone(node)[0]
        likeliest = head.target_ids(head.log_probs(parent_hidden)[0].topk(top_k).indices)
        assert [child.token for child in children] == likeliest.tolist()


# The loop


def test_plain_greedy_equals_hugging_faces(target: LlamaForCausalLM) -> None:
    run = plain_greedy(target, PROMPT, 40)
    generated = target.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False)
    assert run.tokens == generated[0, len(PROMPT) :].tolist()
    assert len(set(run.tokens)) > 10, "the text is too dull to test with"
    logits = target(torch.tensor([[*PROMPT, *run.tokens[:-1]]])).logits[0, len(PROMPT) - 1 :]
    first, second = logits.topk(2).values.T
    assert run.gaps == pytest.approx((first - second).tolist(), abs=1e-4)
    assert min(run.gaps) > 1e-3, "a near-tie: the comparisons below could fail by rounding"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_eagle_gives_plain_decodings_text(
    target: LlamaForCausalLM, head: ReferenceHead, shape: tuple[int, int, int]
) -> None:
    nodes, top_k, depth = shape
    run = ReferenceEagle(target, head, TAPS).generate(PROMPT, nodes=nodes, top_k=top_k, depth=depth, max_new_tokens=40)
    assert run.tokens == plain_greedy(target, PROMPT, 40).tokens
    for round_ in run.rounds:
        assert len(round_.tree_tokens) == len(round_.parents) == nodes
        assert round_.parents[0] == ROOT
        assert all(0 <= parent < row for row, parent in enumerate(round_.parents) if row)
        assert len(set(zip(round_.parents, round_.tree_tokens, strict=True))) == nodes, "siblings differ"
        assert len(round_.path) <= depth + 1
        assert [round_.parents[row] for row in round_.path] == [ROOT, *round_.path[:-1]]


@torch.inference_mode()
def test_rounds_spell_the_text_and_each_tree_follows_from_the_text_before_it(
    target: LlamaForCausalLM, head: ReferenceHead
) -> None:
    eagle = ReferenceEagle(target, head, TAPS)
    nodes, top_k, depth = SHAPES["bushy"]
    run = eagle.generate(PROMPT, nodes=nodes, top_k=top_k, depth=depth, max_new_tokens=40)
    text = [*PROMPT, run.tokens[0]]
    for round_ in run.rounds:
        root, features = eagle.prefill(text[:-1], DynamicCache())
        hidden, past = eagle.extend(features, text[1:], head.empty_cache())
        tree = rerank(eagle.levels(hidden, past, top_k, depth), root, nodes)
        assert round_.tree_tokens == tree.tokens
        assert round_.parents == tree.parents
        text += [*(round_.tree_tokens[row] for row in round_.path[1:]), round_.bonus]
    assert text[: len(PROMPT) + 40] == PROMPT + run.tokens
    moved = [round_.path for round_ in run.rounds if round_.path != list(range(len(round_.path)))]
    assert moved, "no accepted row had to move: nothing was tested of keep_accepted"


@dataclass(frozen=True)
class ScriptedHead:
    """A head that knows the text: after its row at position p it proposes token p + 2 where `right(p)`.

    Its recurrent feature is the position, so the script also tests which positions the loop gives.
    """

    text: list[int]
    right: Callable[[int], bool]

    def empty_cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(1, 0, 1), torch.empty(1, 0, 1)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features.new_full((len(features), 1), float("nan"))

    def forward(self, tokens, hidden, positions, visible, past):
        grown = torch.cat((past[0], torch.zeros(1, len(tokens), 1)), dim=1)
        assert visible.shape == (len(tokens), grown.shape[1])
        assert tokens.shape == positions.shape == hidden.shape[:1]
        return positions[:, None].float(), (grown, grown)

    def log_probs(self, hidden: torch.Tensor) -> torch.Tensor:
        proposals = [
            (self.text[position + 2] + (not self.right(position))) % VOCAB for position in hidden[:, 0].int().tolist()
        ]
        return (9 * torch.nn.functional.one_hot(torch.tensor(proposals), VOCAB)).float().log_softmax(dim=-1)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        return draft_ids


@pytest.mark.parametrize(
    "right",
    [lambda position: True, lambda position: False, lambda position: position % 3 != 0],
    ids=["always", "never", "sometimes"],
)
def test_a_scripted_head_is_accepted_as_far_as_it_is_right(
    target: LlamaForCausalLM, right: Callable[[int], bool]
) -> None:
    depth = 3
    text = PROMPT + plain_greedy(target, PROMPT, 60).tokens
    eagle = ReferenceEagle(target, ScriptedHead(text, right), TAPS)
    run = eagle.generate(PROMPT, nodes=depth + 1, top_k=1, depth=depth, max_new_tokens=40)
    assert PROMPT + run.tokens == text[: len(PROMPT) + 40]
    root = len(PROMPT)  # its place in the text
    for round_ in run.rounds:
        accepted = 0
        while accepted < depth and right(root - 1 + accepted):
            accepted += 1
        assert round_.path == list(range(accepted + 1))
        assert round_.bonus == text[root + accepted + 1]
        root += accepted + 1
    assert root >= len(PROMPT) + 39


@pytest.mark.parametrize("limit", [1, 2, 17])
def test_stops_at_the_limit(target: LlamaForCausalLM, head: ReferenceHead, limit: int) -> None:
    run = ReferenceEagle(target, head, TAPS).generate(PROMPT, nodes=8, top_k=4, depth=3, max_new_tokens=limit)
    assert run.tokens == plain_greedy(target, PROMPT, 40).tokens[:limit]
    assert (limit == 1) == (not run.rounds)


@pytest.mark.parametrize("place", [0, 1, 9, 20])
def test_stops_at_an_eos_inside_an_accepted_path(target: LlamaForCausalLM, place: int) -> None:
    text = plain_greedy(target, PROMPT, 60).tokens
    eos = text[place]
    expected = text[: text.index(eos) + 1]
    eagle = ReferenceEagle(target, ScriptedHead(PROMPT + text, lambda position: True), TAPS)
    run = eagle.generate(PROMPT, nodes=8, top_k=2, depth=4, max_new_tokens=40, eos_token_ids=(eos,))
    assert run.tokens == plain_greedy(target, PROMPT, 40, (eos,)).tokens == expected
