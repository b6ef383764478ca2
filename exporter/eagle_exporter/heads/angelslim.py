"""AngelSlim's EAGLE-3 layout (https://github.com/Tencent/AngelSlim): SafeAILab's names, its own head_dim."""

from __future__ import annotations

from eagle_exporter.heads.source import Source, eagle3_spec, eagle3_taps
from eagle_exporter.heads.spec import HeadSpec

NOTE = (
    "published AngelSlim heads state a rope_theta that they were not always trained with, and may tap "
    "2, (n + 1) // 2 and n - 2: trust the probe, and set --rope-theta or --taps"
)


def read(source: Source) -> HeadSpec:
    """Config without any list of taps: the reference's."""
    body = source.reader()
    body.refuse_unknown_flags(("eagle_aux_hidden_state_layer_ids",))
    taps = eagle3_taps(source, body.ids("eagle_aux_hidden_state_layer_ids"), "outputs")
    return eagle3_spec(source, body, layout="angelslim", taps=taps, notes=(NOTE,))
