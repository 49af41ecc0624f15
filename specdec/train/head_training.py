"""Training an EAGLE-3-style head: its chains unrolled over the target's text."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from specdec.train.export import reload_head, save_head
from specdec.train.head import DraftHead, HeadConfig, KeysValues
from specdec.train.loop import Losses
from specdec.train.loss import drafted_positions, next_tokens, soft_cross_entropy, step_weights
from specdec.train.rows import Batch
from specdec.train.states import KeptStates
from specdec.train.target import FrozenTarget, TargetStates
from specdec.train.vocab import DraftVocab


def unroll(
    head: DraftHead, target: FrozenTarget, batch: Batch, features: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """What ``norm`` and the output head read at each drafted position, [B, T, C] a step.

    The tokens that a chain goes on with are those of the text, which is what it drafted as long as
    its drafts are right; after a wrong one nothing counts.
    """
    mask = batch.mask()
    past: list[KeysValues] = []
    feature = head.fuse(features)
    for step in range(num_steps):
        if head.config.parallel and step:
            embedding = head.mask_embedding.expand_as(feature)
            feature = head.mask_feature.expand_as(feature)
        else:
            embedding = target.embed(next_tokens(batch.tokens, 1 + step))
        feature = head.step(embedding, feature, batch.positions, mask, past)
        yield feature


class HeadTraining:
    """A draft head, the target it learns from, and the vocabulary it proposes from."""

    def __init__(
        self,
        config: HeadConfig,
        target: FrozenTarget,
        vocab: DraftVocab,
        *,
        num_steps: int,
        decay: float,
        seed: int,
    ) -> None:
        model = target.model
        self.target = target
        self._states = KeptStates(target)
        self.vocab = vocab
        self.weights = step_weights(num_steps, decay)
        self._ids = vocab.ids.to(model.device)
        self._known = vocab.known.to(model.device)
        self._rows = model.lm_head[self._ids]  # [draft vocabulary, C]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = DraftHead(config)
        head.norm.weight.data.copy_(model.norm)
        last = model.first_layers()[-1]
        head.start_as({name.removeprefix("."): slot for name, slot in last.weight_slots("")})
        if config.own_head:
            head.lm_head.weight.data.copy_(self._rows)
        self.head = head.to(model.device)

    def prepare(self, batch: Batch) -> None:
        """Take the sizes of the target's states from a batch, and begin as its highest layer.

        A text's first token is left out: its states may be a thousand times larger than others.
        """
        states = self.target(batch)
        self.head.set_feature_scale(states.features, batch.positions > 0)
        self.head.pass_last_feature()

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.head.parameters())

    def losses(self, batch: Batch) -> Losses:
        states = self._states(batch)
        target_logits = states.logits(self._rows)
        known = self._known[states.choice]
        by_step, agreement = [], []
        with self._autocast():
            for step, hidden in enumerate(self._unroll(batch, states, len(self.weights))):
                loss, agreed = soft_cross_entropy(
                    self.head.norm(hidden),
                    self._output_weight,
                    target_logits,
                    drafted_positions(batch, step) & known[:, 1 + step : -1],
                    ahead=1 + step,
                )
                by_step.append(loss)
                agreement.append(agreed)
        total = torch.stack(
            [weight * loss for weight, loss in zip(self.weights, by_step, strict=True)]
        ).sum()
        return Losses(total, torch.stack(by_step).detach(), torch.stack(agreement))

    @torch.no_grad()
    def proposals(self, batch: Batch, k: int) -> Tensor:
        states = self.target(batch)
        drafted = []
        with self._autocast():
            matrix = self._output_weight.to(self._rows.dtype)
            for hidden in self._unroll(batch, states, k):
                rows = self.head.norm(hidden).to(matrix.dtype)
                drafted.append(torch.stack([(row @ matrix.mT).argmax(-1) for row in rows]))
        return self._ids[torch.stack(drafted, dim=-1)]

    def state(self) -> dict[str, Tensor]:
        return dict(self.head.state_dict())

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.head.load_state_dict(state)

    def export(self, folder: Path) -> None:
        save_head(self.head, self.vocab, folder)

    def reload(self, folder: Path) -> None:
        reload_head(self.head, folder)

    def _unroll(self, batch: Batch, states: TargetStates, num_steps: int) -> Iterator[Tensor]:
        return unroll(self.head, self.target, batch, states.features, num_steps)

    @property
    def _output_weight(self) -> Tensor:
        return self.head.lm_head.weight if self.head.config.own_head else self._rows

    def _autocast(self) -> torch.autocast:
        device = self._rows.device.type
        return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
