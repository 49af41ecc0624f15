"""Time the kernels of one Mamba-2 layer beside the bytes that they must move, on one GPU.

    python bench/mamba_layer.py --out mamba.json

The layer is Bamba 9B's between its two projections: convolution, recurrence, keeping and norm. The
floor of decode rows is one read and one write of every request's state. A row of a prompt is one
request of so many tokens, whose recurrence is sequential: it has no floor worth naming.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from timing import copies_of, copy_bandwidth, graph_us, randn
from torch import Tensor

from specdec.bench.environment import describe
from specdec.kernels import mamba

HEADS, SIZE, STATE, GROUPS, TAPS = 128, 64, 128, 1, 4
INNER = HEADS * SIZE
CHANNELS = INNER + 2 * GROUPS * STATE
# (requests, query length)
DECODE = [(reqs, length) for reqs in (1, 8, 64) for length in (1, 5, 9)]
MAX_RUN = 9
PROMPTS = [(1, 128), (1, 2048), (8, 256)]
STATE_BYTES = 4 * HEADS * SIZE * STATE


class Layer:
    """Weights, and states of ``num_reqs`` requests, in as many copies as make reads miss L2."""

    def __init__(self, num_reqs: int, query_len: int, context: int) -> None:
        # As many tokens as a step may bring wait to be folded by the next.
        run_length = min(query_len, MAX_RUN)
        self.folded = max(context - run_length, 0)
        kept = run_length + TAPS - 1
        self.config = mamba.ScanConfig(GROUPS, run_length, 0.0, float("inf"))
        self.weights = [randn(HEADS) for _ in range(3)]
        self.conv, self.bias, self.norm = randn(CHANNELS, TAPS), randn(CHANNELS), randn(INNER)
        self.projected = randn(num_reqs * query_len, INNER + CHANNELS + HEADS)
        count = copies_of(STATE_BYTES * num_reqs, 16)
        self.states = [self._state(num_reqs + 1, kept) for _ in range(count)]
        loc = torch.arange(num_reqs + 1, device="cuda", dtype=torch.int32) * query_len
        places = torch.full((num_reqs,), context, device="cuda", dtype=torch.int32)
        self.runs = mamba.Runs(
            num_tokens=num_reqs * query_len,
            query_start_loc=loc,
            context_lens=places,
            seq_lens=places + query_len,
            state_rows=torch.arange(num_reqs, device="cuda"),
            max_query_len=query_len,
            tentative=False,
        )

    def _state(self, rows: int, kept: int) -> mamba.LayerState:
        return mamba.LayerState(
            randn(rows, HEADS, SIZE, STATE, dtype=torch.float32),
            torch.full((rows, HEADS, SIZE), self.folded, dtype=torch.int32, device="cuda"),
            randn(rows, kept, CHANNELS + HEADS),
            randn(rows, kept, CHANNELS),
        )

    def run(self, state: mamba.LayerState) -> Tensor:
        # A replay has folded the tokens before it: the next one is to find them again.
        state.folded.fill_(self.folded)
        gate, inputs = self.projected[:, :INNER], self.projected[:, INNER:]
        activated = mamba.causal_conv(inputs, self.conv, self.bias, state, self.runs)
        y = mamba.selective_scan(activated, inputs, *self.weights, state, self.runs, self.config)
        mamba.keep_run(inputs, activated, state, self.runs)
        return mamba.gated_rms_norm(y, gate, self.norm, 1e-5, GROUPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth / 1e12:.2f} TB/s; a state: {STATE_BYTES / 2**20:.1f} MiB")
    rows: list[dict[str, Any]] = []
    for context, shapes in ((1000, DECODE), (0, PROMPTS)):
        for num_reqs, query_len in shapes:
            layer = Layer(num_reqs, query_len, context)
            calls = [lambda state=state, layer=layer: layer.run(state) for state in layer.states]
            row: dict[str, Any] = {
                "num_reqs": num_reqs,
                "query_len": query_len,
                "context": context,
                "us": graph_us(calls),
            }
            if context:
                row["floor_us"] = 1e6 * 2 * STATE_BYTES * num_reqs / bandwidth
            rows.append(row)
            floor = f" floor {row['floor_us']:8.1f}" if context else ""
            print(f"{num_reqs:4} x {query_len:5} at {context:5}: {row['us']:8.1f} us{floor}")
    result = {"environment": describe(torch.device("cuda")), "bandwidth": bandwidth, "rows": rows}
    print(json.dumps(result))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
