"""The plain-PyTorch kernels: what the Triton kernels are held to, and what runs on a CPU."""

import pytest
import torch

from specdec.kernels import lora


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("parts", [(63,), (40, 20, 20)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 64, 65, 200])
def test_each_row_gets_its_slots_delta(num_rows, parts):
    """Slot 2 is NaN, and no row's; base rows keep their bits, a negative zero too."""
    a, b = randn(4, len(parts) * 5, 33, seed=1), randn(4, sum(parts), 5, seed=2)
    a[2] = b[2] = torch.nan
    x, out = randn(num_rows, 33, seed=3), randn(num_rows, sum(parts), seed=4)
    out[:, 0] = -0.0
    slots = torch.tensor([1, 1, -1, 3, 0])[torch.arange(num_rows) % 5]
    before = out.clone()
    assert lora.lora_delta_(out, x, a, b, slots.int(), parts) is out
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert torch.equal(out[row].view(torch.int32), before[row].view(torch.int32))
            continue
        deltas, first = [], 0
        for number, width in enumerate(parts):
            shrunk = a[slot, number * 5 : number * 5 + 5] @ x[row]
            deltas.append(b[slot, first : first + width] @ shrunk)
            first += width
        torch.testing.assert_close(out[row], before[row] + torch.cat(deltas))


def test_rows_do_not_depend_on_their_number():
    """Up to rounding, since PyTorch's products on a CPU add in an order of the batch's size."""
    a, b = randn(3, 10, 40, seed=1), randn(3, 60, 5, seed=2)
    x, out = randn(150, 40, seed=3), randn(150, 60, seed=4)
    slots = torch.arange(150) // 4 % 4 - 1
    whole = lora.lora_delta_(out.clone(), x, a, b, slots, (30, 30))
    for rows in (slice(0, 1), slice(3, 70), slice(60, 66), slice(149, 150)):
        part = lora.lora_delta_(out[rows].clone(), x[rows], a, b, slots[rows], (30, 30))
        torch.testing.assert_close(part, whole[rows], rtol=1e-6, atol=1e-5)


def test_rounding_points_in_bfloat16():
    """A x, B (A x) and the sum are each rounded once; float32 sums stay float32."""
    bf16 = torch.bfloat16
    a, b = randn(1, 4, 32, seed=1, dtype=bf16), randn(1, 6, 4, seed=2, dtype=bf16)
    x, slots = randn(3, 32, seed=3, dtype=bf16), torch.zeros(3, dtype=torch.int64)
    shrunk = (x.double() @ a[0].double().T).to(bf16)
    delta = shrunk.double() @ b[0].double().T
    for dtype in (bf16, torch.float32):
        out = randn(3, 6, seed=4, dtype=dtype)
        wanted = (out.double() + delta.to(dtype).double()).to(dtype)
        result = lora.lora_delta_(out.clone(), x, a, b, slots)
        assert result.dtype == dtype
        torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)


def test_an_empty_batch():
    a, b, none = randn(2, 4, 8), randn(2, 6, 4), torch.zeros(0, dtype=torch.int64)
    assert lora.lora_delta_(torch.zeros(0, 6), torch.zeros(0, 8), a, b, none).shape == (0, 6)
