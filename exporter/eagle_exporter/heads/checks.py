"""Whether a head's tensors are those that its spec asks for, and what its draft vocabulary means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from eagle_exporter.heads.spec import UNKNOWN, HeadSpec, TargetShape, Tensors

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ANOTHER = "is it the head of another model?"

Shape = tuple[int, ...]
Spelling = Callable[[str], str]
"""From a tensor's name in the module to its name in the checkpoint, for messages."""


def required_shapes(spec: HeadSpec, target_hidden: int) -> dict[str, Shape]:
    """Tensors that the head cannot do without, by their names in the module. A size may be UNKNOWN."""
    hidden, eagle3 = spec.hidden_size, spec.kind == "eagle3"
    shapes: dict[str, Shape] = {"fc.weight": (hidden, (len(spec.taps) or 3) * target_hidden if eagle3 else 2 * hidden)}
    for layer in range(spec.layers):
        width = 2 * hidden if eagle3 and layer == 0 else hidden
        own = _layer_shapes(spec, width)
        if eagle3 or layer > 0:
            own["input_layernorm.weight"] = (hidden,)
        if eagle3 and layer == 0:
            own["hidden_norm.weight"] = (hidden,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    if eagle3:
        shapes["norm.weight"] = (hidden,)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = ((len(spec.taps) or 3) * target_hidden,)
    if spec.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (target_hidden,) for tap in range(len(spec.taps) or 3)}
    if spec.own_lm_head:
        shapes["lm_head.weight"] = (spec.draft_vocab_size, hidden)
    return shapes


def optional_shapes(spec: HeadSpec, vocab: int) -> dict[str, Shape]:
    """Tensors that a head may have or not: its own embedding, biases, norms of queries and keys."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.attention_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
    own = {f"self_attn.{name}.bias": (size,) for name, size in rows.items()}
    own |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    own |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    shapes: dict[str, Shape] = {"embed_tokens.weight": (vocab, hidden)}
    if spec.kind == "eagle1":
        shapes["fc.bias"] = (hidden,)
    return shapes | {f"layers.{i}.{name}": shape for i in range(spec.layers) for name, shape in own.items()}


def _layer_shapes(spec: HeadSpec, width: int) -> dict[str, Shape]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.attention_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "self_attn.q_proj.weight": (queries, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }


def tensor_problems(
    tensors: Tensors, required: Mapping[str, Shape], optional: Mapping[str, Shape], spelled: Spelling, *, what: str
) -> list[str]:
    """Every reason why `tensors` are not those of a head of kind `what`."""
    known = {**required, **optional}
    found = [f"no {spelled(name)}" for name in sorted(required.keys() - tensors.keys())]
    found += [f"unknown {spelled(name)}" for name in sorted(tensors.keys() - known.keys())]
    found += _halves(tensors, spelled)
    problems = [f"its tensors are not those of {what}: {', '.join(found)}"] if found else []
    for name in sorted(tensors.keys() & known.keys()):
        tensor, expected = tensors[name], known[name]
        problems += _shape_problems(spelled(name), tuple(tensor.shape), expected)
        if tensor.dtype not in _FLOATS:
            problems.append(
                f"{spelled(name)} holds {str(tensor.dtype).removeprefix('torch.')}: quantized heads cannot be exported"
            )
        elif not torch.isfinite(tensor.float().sum()):
            problems.append(f"{spelled(name)} holds NaN or infinite values; the checkpoint is damaged")
    return problems


def _halves(tensors: Tensors, spelled: Spelling) -> list[str]:
    """Tensors that come together or not at all, of which some are there."""
    groups = [
        tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
        ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    ]
    groups.append(tuple(f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")))
    layers = sorted({name.split("self_attn.")[0] for name in tensors if "self_attn." in name})
    missing = []
    for prefix in layers:
        for group in groups:
            there = [prefix + name in tensors for name in group]
            if any(there) and not all(there):
                missing += [
                    f"no {spelled(prefix + n)}" for n, is_there in zip(group, there, strict=True) if not is_there
                ]
    return missing


def _shape_problems(name: str, shape: Shape, expected: Shape) -> list[str]:
    if _fits(shape, expected):
        return []
    if len(shape) == 2 and _fits(shape[::-1], expected):
        return [f"{name} is transposed: it has shape {list(shape)}; expected {list(expected)}"]
    sizes = ", ".join("?" if size == UNKNOWN else str(size) for size in expected)
    return [f"{name} has shape {list(shape)}; expected [{sizes}] by its config and the target's: {_ANOTHER}"]


def _fits(shape: Shape, expected: Shape) -> bool:
    pairs: Iterable[tuple[int, int]] = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(size == wanted or wanted == UNKNOWN for size, wanted in pairs)


def draft_to_target(
    offsets: torch.Tensor | None, membership: torch.Tensor | None, draft_vocab: int, vocab: int, problems: list[str]
) -> torch.Tensor | None:
    """[draft_vocab] target ids of the draft vocabulary, from `d2t`, which holds offsets: target id = id + d2t[id].

    None where the map is the identity or faulty; faults go to `problems`.
    """
    if offsets is None:
        if vocab and draft_vocab and draft_vocab != vocab:
            problems.append(
                f"it has no d2t, which says what its {draft_vocab} draft tokens are among the target's {vocab}: "
                "the checkpoint is not whole, or the head of another model"
            )
        return None
    if offsets.dim() != 1 or (draft_vocab and len(offsets) != draft_vocab):
        problems.append(f"d2t has shape {list(offsets.shape)}; expected [{draft_vocab}], the draft vocabulary")
        return None
    if offsets.is_floating_point():
        problems.append(f"d2t holds {str(offsets.dtype).removeprefix('torch.')}; expected whole numbers")
        return None
    ids = torch.arange(len(offsets)) + offsets.long()
    distinct, last = len(set(ids.tolist())), int(ids.max())
    if distinct != len(ids) or int(ids.min()) < 0 or (vocab and last >= vocab):
        problems.append(
            f"d2t leads to ids {int(ids.min())} to {last}, {distinct} of {len(ids)} distinct; "
            f"the target has {vocab} tokens: {_ANOTHER}"
        )
        return None
    if membership is not None and (
        (vocab and membership.shape != (vocab,)) or not torch.equal(membership.nonzero()[:, 0], ids.sort()[0])
    ):
        problems.append(f"t2d (shape {list(membership.shape)}) and d2t name different tokens of {vocab}")
    return ids


def sharing_problems(spec: HeadSpec, target: TargetShape) -> list[str]:
    """Reasons why the target's embedding or LM head cannot serve where the checkpoint brings none."""
    problems = []
    widths = f"the target's are {target.hidden_size} wide: {_ANOTHER}"
    if not spec.hidden_size:
        return []
    if spec.kind == "eagle1" and spec.hidden_size != target.hidden_size:
        return [
            f"it is {spec.hidden_size} wide, but an EAGLE-1 head draws tokens with the target's LM head, and {widths}"
        ]
    if not spec.own_embedding and spec.hidden_size != target.hidden_size:
        problems.append(f"it is {spec.hidden_size} wide and brings no embed_tokens, and {widths}")
    if not spec.own_lm_head and spec.hidden_size != target.hidden_size:
        problems.append(f"it is {spec.hidden_size} wide and brings no lm_head, and {widths}")
    if not spec.own_lm_head and spec.draft_vocab_size not in (UNKNOWN, target.vocab_size):
        problems.append(
            f"it brings no lm_head, and the target's has {target.vocab_size} tokens, not its {spec.draft_vocab_size}"
        )
    return problems
