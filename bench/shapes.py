"""Shapes of models on paper: specifications without torch, for plans of sizes that nobody has at hand.

What autograd keeps of a layer is 49 x width bytes a token in bfloat16: what a profile of the library's own Llama layer
with a feed-forward of 3.5 x width gives (tests/bench). Peaks of a backward are by rule: what is kept,
gradients of the hidden state and of the widest activation, of which a gate has two at a time, or the gradient of a
weight. It leaves out experts, windows and biases, and what a cpu takes for products.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megatrain.spec import LayerProfile, ModelSpec, ParamSpec, UnitSpec
from megatrain.spec.layer_profile import Growth, Outputs, Peak

HEAD_SIZE = 128
KEPT_NBYTES_PER_WIDTH = 49.0
KEPT_IN_CHUNKS_NBYTES_PER_WIDTH, CHUNK_NBYTES_PER_WIDTH = 11.0, 30.0
"""What is kept where the feed-forward and the norms run in chunks; and of a chunk at work."""
HEAD_FLOATS = 5
"""Float32 values per token and channel that the norm in front of a head makes and keeps."""


@cache  # plans compare models, which is quick for one and the same
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
    left, wide = KEPT_NBYTES_PER_WIDTH * width, 2.0 * inner
    largest, numel, in_chunks = 2.0 * inner * width, 3 * inner * width, KEPT_IN_CHUNKS_NBYTES_PER_WIDTH * width
    chunk = CHUNK_NBYTES_PER_WIDTH * width
    shared = 2.0 * (narrow + 2 * inner) + attention  # the value's, both halves of the gate's
    peak = _peak(Growth(largest, left + wide + 2 * width), Growth(0.0, left + 2 * wide + 2 * width))
    profile = LayerProfile(
        attention_flops=4.0 * width,
        backward=peak,
        backward_in_chunks=_peak(
            Growth(4.0 * numel + largest, in_chunks + 2 * width, per_chunk_token=chunk + wide),
            Growth(4.0 * numel, in_chunks + 2 * width, per_chunk_token=chunk + 2 * wide),
            Growth(0.0, in_chunks + 3 * width, with_kernel=True),
            Growth(0.0, in_chunks + 4 * width),
        ),
        graph=Growth(per_token=left),
        graph_in_chunks=Growth(per_token=in_chunks),
        chunk_numel=numel,
        outputs=Outputs(
            chosen_nbytes=products + attention,
            shared_nbytes=shared,
            attention_nbytes=attention,
            chosen_offloaded=_less(peak, shared),
            attention_offloaded=_less(peak, attention),
            chosen_share=1.0,
            spared_share=inner / (2 * width + 2 * narrow + 3 * inner),
        ),
    )
    table = 2.0 * vocabulary * width
    head_profile = LayerProfile(
        backward=_peak(
            Growth(per_token=4.0 * vocabulary + HEAD_FLOATS * 4 * width, with_kernel=True),
            Growth(table, 4.0 * vocabulary + HEAD_FLOATS * 4 * width),
        )
    )
    tables = LayerProfile(arguments=Growth(per_token=2.0 * 2 * HEAD_SIZE))
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
    embedding = ParamSpec("model.embed_tokens.weight", (vocabulary, width))
    units = [UnitSpec("prologue", "prologue", (embedding,), profile=tables)]
    for index in range(layers):
        params = (ParamSpec(f"model.layers.{index}.{each}.weight", shape) for each, shape in shapes.items())
        units.append(UnitSpec(f"layers.{index}", "layer", tuple(params), (), profile))
    head = () if tied else (ParamSpec("lm_head.weight", (vocabulary, width)),)
    borrows = ("model.embed_tokens.weight",) if tied else ()
    units.append(
        UnitSpec("epilogue", "epilogue", (ParamSpec("model.norm.weight", (width,)), *head), borrows, head_profile)
    )
    return ModelSpec(name, tuple(units), width, vocabulary)


def _peak(*growths: Growth) -> Peak:
    return Peak(growths, growths)


def _less(peak: Peak, per_token: float) -> Peak:
    return _peak(*(replace(each, per_token=each.per_token - per_token) for each in peak.device))
