"""Two replicas on two GPUs: each takes its own, and both write the text of one engine."""

from pathlib import Path

import pytest
import torch
from harness import greedy
from replica_clients import ServedReplicas
from tiny import make_tiny

import specdec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def visible_gpu(pid: int) -> str:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)["CUDA_VISIBLE_DEVICES"]


def test_each_replica_has_its_gpu_and_the_text_of_one_engine(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "tiny", vocab=256, tokenizer="bytes", dtype=torch.bfloat16)
    prompts = [f"prompt {number}" for number in range(6)]
    with specdec.Engine(str(folder), None, 0, num_kv_blocks=64) as engine:
        wanted = [each.text for each in engine.generate(prompts, greedy(24))]
    free = [torch.cuda.mem_get_info(number)[0] for number in (0, 1)]
    options = ["--draft", "layer_skip:1", "--served-model-name", "tiny", "--max-num-seqs", "8"]
    served = ServedReplicas(str(folder), *options, "--num-kv-blocks", "256")
    try:
        assert sorted(visible_gpu(pid) for pid in served.workers) == ["0", "1"]
        for number in (0, 1):
            # A context and its graphs alone take more.
            assert free[number] - torch.cuda.mem_get_info(number)[0] > 100 << 20
        assert [served.text(prompt, max_tokens=24) for prompt in prompts] == wanted
        tokens = served.metric("specdec_generated_tokens_total", model="base")
        assert tokens == {"0": 3 * 24, "1": 3 * 24}
    finally:
        served.kill()
