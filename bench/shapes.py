"""Shapes of models on paper: specifications without torch, for plans of sizes that nobody has at hand.

What autograd keeps of a layer is 49 x width bytes a token in bfloat16: what a profile of the library's own Llama layer
with a feed-forward of 3.5 x width gives (tests/bench). It leaves out experts, windows and biases, and the
moments of a layer's backward, for which the plan then has a rule (`schedule.workspace`).
"""

from __future__ import annotations

from megatrain.spec import LayerProfile, ModelSpec, ParamSpec, UnitSpec

HEAD_SIZE = 128
KEPT_NBYTES_PER_WIDTH = 49.0
CHUNKED_NBYTES_PER_WIDTH, CHUNK_NBYTES_PER_WIDTH = 36.0, 30.0
"""Of these, what is not kept where the feed-forward and the norms run in chunks; and what is kept of a chunk."""


def llama_shape(
    name: str,
    layers: int,
    width: int,
    *,
    feed_forward: int | None = None,
    vocabulary: int = 128_256,
    key_value_heads: int = 8,
    tied: bool = False,
) -> ModelSpec:
    """A Llama: grouped-query attention with heads of 128, a gated feed-forward of 3.5 x `width` unless given."""
    inner = feed_forward or 7 * width // 2
    narrow = min(width, key_value_heads * HEAD_SIZE)
    attention = 2.0 * width + 4 * width / HEAD_SIZE  # its output, and a float32 per head
    products = 2.0 * (2 * width + 2 * narrow + 2 * inner)  # the last one is spared
    profile = LayerProfile(
        attention_flops=4.0 * width,
        kept_nbytes=KEPT_NBYTES_PER_WIDTH * width,
        chunked_nbytes=CHUNKED_NBYTES_PER_WIDTH * width,
        chunk_nbytes=CHUNK_NBYTES_PER_WIDTH * width,
        chunk_numel=3 * inner * width,
        chosen_nbytes=products + attention,
        shared_nbytes=2.0 * (narrow + 2 * inner) + attention,  # the value's, both halves of the gate's
        attention_nbytes=attention,
        chosen_share=1.0,
        spared_share=inner / (2 * width + 2 * narrow + 3 * inner),
    )
    shapes = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (narrow, width),
        "self_attn.v_proj": (narrow, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    table = ParamSpec("model.embed_tokens.weight", (vocabulary, width))
    units = [UnitSpec("prologue", "prologue", (table,), looks_up=True)]
    for index in range(layers):
        params = (ParamSpec(f"model.layers.{index}.{each}.weight", shape) for each, shape in shapes.items())
        units.append(UnitSpec(f"layers.{index}", "layer", tuple(params), (), profile))
    head = () if tied else (ParamSpec("lm_head.weight", (vocabulary, width)),)
    borrows = ("model.embed_tokens.weight",) if tied else ()
    units.append(UnitSpec("epilogue", "epilogue", (ParamSpec("model.norm.weight", (width,)), *head), borrows))
    return ModelSpec(name, tuple(units), width, vocabulary)
