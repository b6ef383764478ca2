"""Forward passes of training: one over the true features, then several that eat the head's own output.

EAGLE-3's *training-time test*: at inference a drafted row sees the rows of the committed text and the drafted rows
before it in its own branch. Step 1 is the pass over the committed text. In step s, row i continues the chain that
starts at row i: it reads token i + s and the output that step s - 1 gave for the same row, stands s - 1 positions
further, and sees

    the keys of step 1 up to its own start, i        (a causal mask, as in step 1)
    its chain's own keys of steps 2 ... s            (one key a step: the diagonals of the mask)

Rows of different chains never see each other, so a step may go on with a part of the rows, and is exact for those.

    B  sequences    C  columns of step 1    R  rows that are trained    G  query heads of a key head
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tools.train.batches import Batch
from tools.train.losses import Labels
from tools.train.model import DraftHead

Choose = Callable[[int], torch.Tensor]
"""From a number of rows to the indices of those that go on, rising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step gave."""

    number: int
    """From 1 on."""
    rows: torch.Tensor
    """[R] the chains' starts, counted from the batch's first answer row."""
    hidden: torch.Tensor
    """[B, R, h] the layer's output: the next step's features."""


def every_row(count: int) -> torch.Tensor:
    """All rows go on."""
    return torch.arange(count)


def unroll(
    head: DraftHead, batch: Batch, tapped: torch.Tensor, *, steps: int, choose: Choose = every_row
) -> Iterator[Step]:
    """The steps one by one. tapped: [B, C, taps, h] features, disturbed or not."""
    layer, prompt, device = head.layer, batch.prompt_rows, tapped.device
    columns = torch.arange(tapped.shape[1], device=device)
    positions = (columns - batch.pad[:, None]).clamp(min=0)  # [B, C]
    rows = torch.arange(batch.answer_rows, device=device)
    visible = (columns <= prompt + rows[:, None]) & (columns >= batch.pad[:, None, None])  # [B, R, C]

    x, residual = head.attention_input(batch.tokens[:, 1 : len(columns) + 1], head.fuse(tapped).float())
    keys, values = layer.keys_values(x, positions)
    query = layer.queries(x[:, prompt:], positions[:, prompt:])
    hidden = layer.finish(attend(query, keys, values, visible, []), residual[:, prompt:].float())
    yield Step(number=1, rows=rows, hidden=hidden)

    chain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(2, steps + 1):
        kept = choose(len(rows)).to(device)
        rows, visible, hidden = rows[kept], visible[:, kept], hidden[:, kept]
        chain = [(key[:, :, kept], value[:, :, kept]) for key, value in chain]
        at = positions[:, prompt + rows] + number - 1
        x, residual = head.attention_input(batch.tokens[:, prompt + rows + number], hidden)
        chain.append(layer.keys_values(x, at))
        hidden = layer.finish(attend(layer.queries(x, at), keys, values, visible, chain), residual.float())
        yield Step(number=number, rows=rows, hidden=hidden)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    chain: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Rows over the keys of step 1 that are visible to them, and over their chains' own.

    query [B, H, R, D], scaled; keys and values [B, Hkv, C, D]; visible [B, R, C]; each of the chain twice
    [B, Hkv, R, D]. Returns [B, H, R, D].
    """
    batch, heads, rows, head_dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    query = query.view(batch, kv_heads, -1, rows, head_dim)  # [B, Hkv, G, R, D]
    scores = (query.flatten(2, 3) @ keys.transpose(2, 3)).view(batch, kv_heads, -1, rows, columns)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    own = [(query * key[:, :, None]).sum(dim=-1, keepdim=True).to(scores.dtype) for key, _ in chain]
    weights = torch.cat((scores, *own), dim=-1).softmax(dim=-1)
    out = (weights[..., :columns].flatten(2, 3) @ values).view(query.shape)
    for index, (_, value) in enumerate(chain, start=columns):
        out = out + weights[..., index, None] * value[:, :, None]
    return out.view(batch, heads, rows, head_dim)


def labels_of(
    batch: Batch, step: Step, draft_id_of: torch.Tensor, law: torch.Tensor | None
) -> tuple[Labels, torch.Tensor, int]:
    """What a step's rows should have said: row i of step s the token i + 1 + s.

    draft_id_of: [V] the draft's id of each token of the target, -1 where it has none.
    law: [B, R + steps - 1, W] the target's distributions of the labels from step 1's first one on.

    Returns the labels of the rows whose token the draft can say; the places [n] of these among all [B * R]; and the
    number of rows that have a token to say at all.
    """
    columns = batch.prompt_rows + step.rows + 1 + step.number
    ids = draft_id_of[batch.tokens[:, columns]]
    inside = columns < batch.ends[:, None]
    sequence, row = torch.nonzero(inside & (ids >= 0), as_tuple=True)
    chosen = None if law is None else law[sequence, step.rows[row] + step.number - 1]
    return Labels(ids=ids[sequence, row], law=chosen), sequence * len(step.rows) + row, int(inside.sum())
