"""SafeAILab's own layouts (https://github.com/SafeAILab/EAGLE): EAGLE-1/2, and EAGLE-3 with one `midlayer`."""

from __future__ import annotations

from eagle_exporter.heads.source import Source, eagle3_spec, eagle3_taps
from eagle_exporter.heads.spec import UNKNOWN, HeadSpec


def read_eagle1(source: Source) -> HeadSpec:
    """EAGLE-1 and EAGLE-2 are one head, drafted with static or dynamic trees.

    Its feature is what the target's LM head reads: `hidden_states` of index n, after the final norm.
    """
    body, target = source.reader(), source.target
    body.refuse_unknown_flags(())
    source.check_quantization()
    bias = body.flag("bias", default=True)
    if bias and "fc.bias" not in source.tensors:
        source.problems.append('it has no fc.bias, and its config does not say "bias": false')
    if not bias and "fc.bias" in source.tensors:
        source.problems.append('it has fc.bias, but its config says "bias": false')
    vocab = body.size("vocab_size")
    if target is not None and vocab not in (UNKNOWN, target.vocab_size):
        source.problems.append(
            f"its config has vocab_size {vocab}, and the target has {target.vocab_size} tokens: "
            "is it the head of another model?"
        )
    return HeadSpec(
        kind="eagle1",
        layout="safeailab-eagle1",
        taps=(target.layers,) if target is not None else (),
        position_offset=0,
        layers=body.size("num_hidden_layers", default=1),
        draft_vocab_size=vocab,
        own_lm_head="lm_head.weight" in source.tensors,
        **source.sizes(body),
    )


def read_eagle3(source: Source) -> HeadSpec:
    """EAGLE-3: taps 2, n // 2 and n - 3 unless `eagle_feature_layers` names others, as boundaries."""
    body = source.reader()
    body.refuse_unknown_flags(("eagle_feature_layers",))
    taps = eagle3_taps(source, body.ids("eagle_feature_layers"), "hidden_states")
    return eagle3_spec(source, body, layout="safeailab", taps=taps)
