"""The architectures that have an implementation here, and how they differ from Llama's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """How a family's files call what Llama's call otherwise."""

    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How an architecture differs from Llama's, beyond what its config.json says."""

    model_type: str
    qkv_bias: bool | None = None  # None: as the field attention_bias says
    qk_norm: bool = False
    default_head_size: int | None = None  # None: hidden_size / num_attention_heads
    default_eps: float = 1e-6  # of the norms
    default_theta: float = 10000.0  # of the rotary embedding
    has_experts: bool = False
    has_latents: bool = False  # multi-head latent attention
    activation: str = "silu"  # of the gate: silu, or gelu_tanh
    # Gemma's: norms of 1 + weight, norms on what attention and MLP give, embeddings times the
    # root of their size, tied by default.
    is_gemma: bool = False
    brings_code: bool = False  # its files come with code for what is known here; it is not run
    has_recurrence: bool = False  # Mamba-2 layers beside attention
    names: Names = Names()


FAMILIES = {
    "LlamaForCausalLM": Family(model_type="llama"),
    "MistralForCausalLM": Family(model_type="mistral", qkv_bias=False),
    "Qwen2ForCausalLM": Family(model_type="qwen2", qkv_bias=True),
    "MiMoForCausalLM": Family(model_type="mimo", qkv_bias=True, brings_code=True),
    "Qwen3ForCausalLM": Family(model_type="qwen3", qk_norm=True, default_head_size=128),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        qkv_bias=False,
        has_experts=True,
        default_eps=1e-5,
        default_theta=1e6,
    ),
    "Qwen2MoeForCausalLM": Family(model_type="qwen2_moe", has_experts=True),
    "Qwen3MoeForCausalLM": Family(model_type="qwen3_moe", qk_norm=True, has_experts=True),
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2", has_experts=True, has_latents=True, brings_code=True
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3", has_experts=True, has_latents=True, brings_code=True
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2", default_head_size=256, activation="gelu_tanh", is_gemma=True
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        qk_norm=True,
        default_head_size=256,
        activation="gelu_tanh",
        is_gemma=True,
    ),
    "BambaForCausalLM": Family(
        model_type="bamba",
        default_eps=1e-5,
        has_recurrence=True,
        names=Names(mlp="feed_forward", mlp_norm="pre_ff_layernorm", final_norm="final_layernorm"),
    ),
}
