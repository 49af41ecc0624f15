"""The ids that a draft head can propose: the most frequent of the target's answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.train.corpus import Document


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Ids of the target in ascending order; the head's row i stands for ``ids[i]``."""

    ids: Tensor  # [draft vocabulary] int64
    known: Tensor  # [vocabulary] bool
    coverage: float  # share of the answers' tokens that the head can propose

    @property
    def offsets(self) -> Tensor:
        """``d2t`` of the public checkpoints: what row numbers lack to the target's ids."""
        return self.ids - torch.arange(len(self.ids))


def count_vocab(
    documents: Iterable[Document],
    *,
    size: int,
    vocab_size: int,
    usable: int,
    always: Sequence[int],
) -> DraftVocab:
    """The ``size`` most frequent ids of the answers, with those of ``always`` among them.

    ``vocab_size``: rows of the target's embedding; ids from ``usable`` on are never emitted. Of
    equally frequent ids the lower ones are taken.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        for start, end in document.spans:
            counts += np.bincount(document.tokens[start:end], minlength=vocab_size)
    rank = counts.copy()
    rank[list(always)] = np.iinfo(np.int64).max
    rank[usable:] = -1
    chosen = np.sort(np.argsort(-rank, kind="stable")[: min(size, usable)])
    known = np.zeros(vocab_size, dtype=np.bool_)
    known[chosen] = True
    return DraftVocab(
        ids=torch.from_numpy(chosen),
        known=torch.from_numpy(known),
        coverage=float(counts[chosen].sum() / max(counts.sum(), 1)),
    )
