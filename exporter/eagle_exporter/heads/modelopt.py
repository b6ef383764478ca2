"""NVIDIA ModelOpt's EAGLE-3 layout (https://github.com/NVIDIA/Model-Optimizer): numbered layers, a flat config."""

from __future__ import annotations

from eagle_exporter.heads.source import EAGLE3_FLAGS, Source, eagle3_spec, eagle3_taps
from eagle_exporter.heads.spec import HeadSpec

_IDS = "eagle_aux_hidden_state_layer_ids"
_SWITCHES = {
    "use_aux_hidden_state": (True, "a head over the last hidden state alone is not supported"),
    "use_input_layernorm_in_first_layer": (True, "a first layer without input norm is not supported"),
    "use_last_layernorm": (True, "a head without final norm is not supported"),
    "next_layer_regular": (True, "later layers that read the embedding too are not supported"),
    "use_mtp_layernorm": (False, "norms of multi-token prediction are not supported"),
}
_PARALLEL = "parallel_draft_step"


def read(source: Source) -> HeadSpec:
    """Layer ids count layer outputs; without an lm_head the target's serves; embeddings are the target's, scaled."""
    body = source.reader()
    eagle = body.section("eagle_config")
    body.refuse_unknown_flags(("eagle_config", _IDS))
    eagle.refuse_unknown_flags((_IDS, _PARALLEL, *_SWITCHES, *EAGLE3_FLAGS))
    for name, (expected, why) in _SWITCHES.items():
        eagle.must_be(name, expected, why)
    if (eagle.get(_PARALLEL) or 1) != 1:
        eagle.fault(_PARALLEL, eagle.get(_PARALLEL), "1: parallel drafting is not supported")
    taps = eagle3_taps(source, eagle.ids(_IDS) or body.ids(_IDS), "outputs")
    return eagle3_spec(
        source, body, flags=eagle, layout="modelopt", taps=taps, may_borrow_lm_head=True, scaled_embedding=True
    )
