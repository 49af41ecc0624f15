"""Documents on disk, in rows, in order; and the draft vocabulary that is counted from them."""

from pathlib import Path

import pytest
import torch
from made import documents

from specdec.train.corpus import Corpus, Document
from specdec.train.rows import PADDING, BatchOrder, PackedRows
from specdec.train.vocab import count_vocab


def test_documents_come_back_as_they_were_written(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    first = documents([5, 8], 99)
    second = [Document(7, False, [1, 2, 3, 4, 5, 6], [(1, 3), (4, 6)]), Document(9, True, [3], [])]
    corpus.append(first)
    corpus.append(second)
    again = Corpus(tmp_path)
    assert again.num_shards == 2
    assert again.documents() == first + second
    assert again.num_tokens() == 5 + 8 + 6 + 1
    assert not again.is_done
    corpus.finish({"seconds": 1.5})
    assert again.is_done and again.summary == {"seconds": 1.5}


def test_a_file_that_was_not_finished_is_no_file(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    corpus.append(documents([5], 99))
    (tmp_path / "shard-00001.tmp").write_bytes(b"half")
    assert corpus.num_shards == 1
    corpus.append(documents([6], 99))
    assert corpus.num_tokens() == 11


def test_rows_hold_every_document_once_and_whole() -> None:
    lengths = [9, 30, 3, 17, 32, 8, 8, 8, 21, 5]
    made = documents(lengths, 99)
    rows = PackedRows(made, 32, "cpu")
    batch = rows.batch(range(len(rows)))
    found = {}
    for i, row in enumerate(rows.rows):
        for j, (document, start) in enumerate(row.places):
            place = slice(start, start + len(document.tokens))
            assert batch.tokens[i, place].tolist() == document.tokens
            assert batch.positions[i, place].tolist() == list(range(len(document.tokens)))
            assert batch.document[i, place].unique().tolist() == [j]
            assert batch.answer[i, place].tolist() == [
                at >= 3 for at in range(len(document.tokens))
            ]
            found[document.number] = True
    assert len(found) == len(lengths)
    assert int((batch.document != PADDING).sum()) == sum(lengths)
    # A tenth of the rows more than the least there could be, not one row a document.
    assert len(rows) <= -(-sum(lengths) // 32) + 2


def test_a_query_sees_its_own_document_up_to_itself() -> None:
    batch = PackedRows(documents([3, 4], 9), 8, "cpu").batch([0])
    mask = batch.mask()[0, 0]
    assert mask[2].tolist() == [True] * 3 + [False] * 5
    assert mask[4].tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert bool(mask.diagonal().all())  # padding too: a row without a key would be NaN


def test_every_epoch_takes_every_row_once_in_another_order() -> None:
    order = BatchOrder(12, 4, seed=5)
    epochs = [[order.rows(3 * epoch + i) for i in range(3)] for epoch in range(2)]
    for epoch in epochs:
        assert sorted(row for rows in epoch for row in rows) == list(range(12))
    assert epochs[0] != epochs[1]
    again = BatchOrder(12, 4, seed=5)
    assert again.rows(4) == epochs[1][1]  # without having gone through the first epoch
    assert BatchOrder(12, 4, seed=6).rows(0) != epochs[0][0]
    assert BatchOrder(2, 4, seed=5).steps_per_epoch == 1


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="--tokens"):
        PackedRows([], 32, "cpu")
    with pytest.raises(ValueError, match=r"33 tokens.*--seq-len 32"):
        PackedRows(documents([33], 99), 32, "cpu")


def test_the_draft_vocabulary_is_the_most_frequent_of_the_answers() -> None:
    made = [
        Document(0, True, [9, 9, 9, 9, 3, 3, 3, 5], [(4, 8)]),
        Document(1, True, [9, 4, 4, 6], [(1, 4)]),
    ]
    vocab = count_vocab(made, size=4, vocab_size=12, usable=11, always=[8])
    assert vocab.ids.tolist() == [3, 4, 5, 8]  # 9 is a prompt's alone; 5 comes before 6
    assert vocab.known.nonzero().flatten().tolist() == [3, 4, 5, 8]
    assert vocab.coverage == pytest.approx(6 / 7)
    assert (vocab.offsets + torch.arange(4)).tolist() == vocab.ids.tolist()


def test_a_draft_vocabulary_never_holds_what_cannot_be_emitted() -> None:
    made = [Document(0, True, [1, 2], [(0, 2)])]
    vocab = count_vocab(made, size=99, vocab_size=12, usable=10, always=[0])
    assert vocab.ids.tolist() == list(range(10))
    assert vocab.known.tolist() == [True] * 10 + [False] * 2
