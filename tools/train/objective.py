"""What training minimises.

EAGLE-1: SmoothL1 between the head's features and the target's + 0.1 x cross-entropy of the frozen LM head on both, with
uniform noise on the features that it reads. EAGLE-3: the cross-entropies of the unrolled steps, averaged by the
steps' weights; nothing holds its features to the target's.
"""

from __future__ import annotations

import torch

from tools.train.batches import Batch
from tools.train.losses import CHUNK, cross_entropy, feature_loss
from tools.train.model import DraftHead
from tools.train.options import Options
from tools.train.unroll import labels_of, unroll

EAGLE1_CROSS_ENTROPY = 0.1


class Objective:
    """The loss of a batch."""

    def __init__(self, head: DraftHead, lm_head: torch.Tensor, options: Options) -> None:
        """lm_head: [V, h] of the target, for its distributions."""
        self.head, self.options = head, options
        ids = head.draft_ids
        lm_head = lm_head.to(ids.device)
        own = lm_head if len(ids) == len(lm_head) else lm_head[ids]
        self._lm_head = own.to(self._dtype)  # [W, h]
        self.draft_id_of = torch.full((head.shape.vocab,), -1, device=ids.device)
        """[V] the draft's id of each token, -1 where it has none."""
        self.draft_id_of[ids] = torch.arange(len(ids), device=ids.device)

    def __call__(self, batch: Batch, steps: int, random: torch.Generator) -> tuple[torch.Tensor, list[int], list[int]]:
        """The loss; for each step how many best tokens were the data's, of how many."""
        head, options = self.head, self.options
        law = self._law(batch) if options.labels == "target" else None
        tapped = tapped_for(head, batch)
        if head.shape.kind == "eagle1":
            noise = torch.rand(tapped.shape, generator=random) * 2 - 1
            tapped = tapped + noise.to(tapped.device) * options.noise

        def choose(rows: int) -> torch.Tensor:
            kept = max(1, round(rows * options.thin))
            return torch.randperm(rows, generator=random)[:kept].sort().values

        output_weight = head.output_weight.to(self._dtype)
        loss, weights = torch.zeros((), device=tapped.device), 0.0
        right, counted = [], []
        for step in unroll(head, batch, tapped, steps=steps, choose=choose):
            labels, places, total = labels_of(batch, step, self.draft_id_of, law)
            hidden = step.hidden.flatten(0, 1)[places]  # [n, h]
            entropy, best = cross_entropy(head.output_norm(hidden).to(self._dtype), output_weight, labels)
            weight = options.decay ** (step.number - 1)
            if head.shape.kind == "eagle1":
                true = batch.features[:, batch.prompt_rows + 1 :, -1][:, step.rows].flatten(0, 1)[places]
                entropy = feature_loss(hidden, true.float()) + EAGLE1_CROSS_ENTROPY * entropy
            loss, weights = loss + weight * entropy, weights + weight
            right.append(int((best == labels.ids).sum()))
            counted.append(total)
        return loss / weights, right, counted

    @property
    def _dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.options.bf16 else torch.float32

    @torch.no_grad()
    def _law(self, batch: Batch) -> torch.Tensor:
        """[B, R + steps - 1, W] the target's distributions over the draft's tokens, of the labels from step 1's on."""
        states = batch.features[:, batch.prompt_rows + 1 : -1, -1].to(self._dtype)
        logits = states.flatten(0, 1) @ self._lm_head.t()
        for rows in logits.split(CHUNK):  # in place, little by little: the whole in float32 would not stay in any cache
            rows.copy_(rows.softmax(dim=-1, dtype=torch.float32))
        return logits.view(*states.shape[:2], -1)


def tapped_for(head: DraftHead, batch: Batch) -> torch.Tensor:
    """[B, C, taps, h] what the head reads of the batch's features."""
    columns = batch.features[:, : batch.prompt_rows + batch.answer_rows]
    return (columns[:, :, -1:] if head.shape.kind == "eagle1" else columns[:, :, :-1]).float()
