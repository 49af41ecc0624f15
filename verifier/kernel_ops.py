"""The kernels as operators, so that a compiler sees a kernel's name and shapes, never its inside.

A kernel's order of additions and rounding points are what makes a row the same in every batch; a
compiler that fused them anew would move bits. Only compiled pieces call these operators: the model
calls the functions themselves. Shape letters: T token rows, N output features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.kernels.activation import gelu_tanh_mul, silu_mul
from specdec.kernels.head_linear import head_linear
from specdec.kernels.linear import linear, linear_add, linear_silu_mul
from specdec.kernels.lora import lora_embedding_, lora_linear, lora_linear_silu_mul
from specdec.kernels.moe import apply_experts, route_experts
from specdec.kernels.norm import add_rms_norm, rms_norm
from specdec.kernels.rope import apply_rope
from specdec.verifier.parallel.collectives import all_reduce

_library = torch.library.Library("specdec", "FRAGMENT")


def _rows_by(x: Tensor, features: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], features), dtype=dtype or x.dtype)


def _register(schema: str, kernel: Callable[..., Any], shape: Callable[..., Any]) -> OpOverload:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, shape, "Meta")
    return getattr(torch.ops.specdec, name).default


KERNEL_OPS: dict[Callable[..., Any], OpOverload] = {
    linear: _register(
        "linear(Tensor x, Tensor weight, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
        linear,
        lambda x, weight, bias=None, out_dtype=None: _rows_by(x, weight.shape[0], out_dtype),
    ),
    linear_add: _register(
        "linear_add(Tensor x, Tensor weight, Tensor residual) -> Tensor",
        linear_add,
        lambda x, weight, residual: _rows_by(x, weight.shape[0]),
    ),
    linear_silu_mul: _register(
        "linear_silu_mul(Tensor x, Tensor weight) -> Tensor",
        linear_silu_mul,
        lambda x, weight: _rows_by(x, weight.shape[0] // 2),
    ),
    rms_norm: _register(
        "rms_norm(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> Tensor",
        rms_norm,
        lambda x, *_: x.new_empty(x.shape),
    ),
    add_rms_norm: _register(
        "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, "
        "bool unit_offset=False) -> (Tensor, Tensor)",
        add_rms_norm,
        lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)),
    ),
    silu_mul: _register(
        "silu_mul(Tensor gate_up) -> Tensor",
        silu_mul,
        lambda gate_up: _rows_by(gate_up, gate_up.shape[-1] // 2),
    ),
    gelu_tanh_mul: _register(
        "gelu_tanh_mul(Tensor gate_up) -> Tensor",
        gelu_tanh_mul,
        lambda gate_up: _rows_by(gate_up, gate_up.shape[-1] // 2),
    ),
    apply_rope: _register(
        "apply_rope(Tensor q, Tensor k, Tensor cos_sin, Tensor positions) -> (Tensor, Tensor)",
        apply_rope,
        lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    ),
    head_linear: _register(
        "head_linear(Tensor x, Tensor weight) -> Tensor",
        head_linear,
        lambda x, weight: _rows_by(x, weight.shape[2]),
    ),
    route_experts: _register(
        "route_experts(Tensor logits, Tensor? bias, int top_k, bool sigmoid, bool normalize, "
        "float scale, int num_groups, int top_groups) -> (Tensor, Tensor)",
        route_experts,
        lambda logits, bias, top_k, *_: (
            _rows_by(logits, top_k, torch.int32),
            _rows_by(logits, top_k, torch.float32),
        ),
    ),
    apply_experts: _register(
        "apply_experts(Tensor x, Tensor gate_up, Tensor down, Tensor experts, Tensor weights) "
        "-> Tensor",
        apply_experts,
        lambda x, *_: x.new_empty(x.shape),
    ),
    lora_linear: _register(
        "lora_linear(Tensor x, Tensor weight, Tensor? bias, Tensor a_stack, Tensor b_stack, "
        "Tensor slot_of_token, int[]? parts=None, Tensor? tiles=None) -> Tensor",
        lora_linear,
        lambda x, weight, *_: _rows_by(x, weight.shape[0]),
    ),
    lora_linear_silu_mul: _register(
        "lora_linear_silu_mul(Tensor x, Tensor weight, Tensor a_stack, Tensor b_stack, "
        "Tensor slot_of_token, Tensor? tiles=None) -> Tensor",
        lora_linear_silu_mul,
        lambda x, weight, *_: _rows_by(x, weight.shape[0] // 2),
    ),
    # An operator already, whoever calls it.
    all_reduce: torch.ops.specdec.all_reduce.default,
    # The model reads the result alone, so that the operator need not write in place.
    lora_embedding_: _register(
        "lora_embedding(Tensor out, Tensor ids, Tensor a_stack, Tensor b_stack, "
        "Tensor slot_of_token) -> Tensor",
        lambda out, *rest: lora_embedding_(out.clone(), *rest),
        lambda out, *_: torch.empty_like(out),
    ),
}
