"""Dequantizes published checkpoints (mxfp4, fp8, compressed-tensors) while they load, one parameter at a time.

Which tensors of the files make a weight is transformers' business: its quantizers extend the conversion of names and
layouts by the companions of each weight, its scales above all. The values are computed here, bit for bit as
transformers computes them, because its own operations hold several copies of all experts of a layer, read the size of
an fp8 block off the grid of scales (wrong where the last block is cut) or need another package. The arithmetic is
float32 in place, so a weight costs its float32 value and its quantized bytes.

Not handled: formats that reorder columns (`actorder: group`), 3, 5, 6 or 7 bits, nvfp4, and anything but these three
families; they are refused from the config alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from megatrain.errors import ModelError

Parts = Mapping[str, Tensor]
"""What the files hold of one weight: its tensor and companions, by the end of their names (`weight_scale_inv`)."""

OF_ACTIVATIONS = ("activation_scale", "input_scale", "output_scale", "q_scale", "k_scale", "v_scale")
"""Ends of the names of tensors that only a quantized forward pass reads."""

FIX = (
    "use the float32 or bfloat16 weights that it was made from, or an mxfp4, fp8 or int4 compressed-tensors checkpoint"
)

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of E2M1, by their bits."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The fields of the quantization that a config, or a part of a composite config, declares; `None` if none does."""
    for part in _parts_of(config):
        declared = getattr(part, "quantization_config", None)
        if declared:
            return dict(declared if isinstance(declared, Mapping) else declared.to_dict())
    return None


def drop_quantization(config: PreTrainedConfig) -> None:
    """Remove from a config what it says of the files' quantization: the model built from it holds plain weights."""
    for part in _parts_of(config):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def _parts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return [part for part in parts if isinstance(part, PreTrainedConfig)]


def quantizer_of(config: PreTrainedConfig, *, where: str) -> Quantizer | None:
    """What loads the checkpoint that a config declares to be quantized, or `None` for plain weights.

    Raises `ModelError` for a quantization that cannot be undone here.
    """
    fields = quantization_of(config)
    if fields is None:
        return None
    kind = _KINDS.get(str(fields.get("quant_method")))
    why = f"its method is {fields.get('quant_method')}" if kind is None else kind.refusal(fields)
    if kind is None or why:
        raise ModelError(f"a quantized checkpoint that cannot be dequantized ({why})", where=where, fix=FIX)
    if not kind.serialized_names:  # only now: a later transformers would be installed for nothing
        what = f"transformers {transformers.__version__} does not tell which tensors of a quantized checkpoint make one"
        raise ModelError(what, where=where, fix="install a later transformers")
    return kind(fields)


def _names_of(quantizer: type[HfQuantizer]) -> dict[str, list[str]]:
    """Weight -> names of its tensors in the files; nothing by an early transformers 5."""
    return getattr(quantizer, "serialized_names", {})


class Quantizer(HfQuantizer):
    """One of transformers' quantizers with the operation that computes values replaced; it changes no model."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        declared: Any = SimpleNamespace(**{**fields, "dequantize": True})
        super().__init__(declared)
        self.fields = fields

    @classmethod
    def refusal(cls, fields: Mapping[str, Any]) -> str:
        """Why checkpoints with these fields cannot be dequantized; empty if they can."""
        return ""

    @property
    def name(self) -> str:
        """The format as people call it."""
        return str(self.fields["quant_method"])

    @property
    def ends(self) -> tuple[str, ...]:
        """Ends of the names of a quantized weight's tensors in the files."""
        return tuple(end for ends in self.serialized_names.values() for end in ends if end not in OF_ACTIVATIONS)

    def value(self, parts: Parts, *, is_expert: bool) -> Tensor:
        """The float32 weight that a checkpoint's tensors stand for; a plain tensor as it is.

        is_expert: it is one of several matrices that are merged. Raises `ValueError` for what does not fit together.
        """
        raise NotImplementedError

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Dequantize}

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """A model's conversions of names and layouts, extended by the companions of its weights."""
        conversions: list[Any] = super().update_weight_conversions(  # type: ignore[no-untyped-call]
            weight_conversions, model
        )
        for conversion in conversions:
            operations = conversion.operations if isinstance(conversion, WeightConverter) else []
            if len(operations) > 1 and isinstance(operations[0], _Dequantize):
                operations[0].merges = type(operations[1]) is MergeModulelist and operations[1].dim == 0
        return conversions

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


class _Dequantize(ConversionOps):
    """The first operation of each conversion: from a checkpoint's tensors to plain weights in the model's dtype."""

    def __init__(self, hf_quantizer: Quantizer) -> None:
        self.hf_quantizer = hf_quantizer
        self.merges = False
        """Whether the next operation stacks the matrices: then they are computed in place in the stack."""

    def __deepcopy__(self, memo: object) -> _Dequantize:
        return self  # it has no state, and the library copies the operation for each tensor

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
    ) -> dict[str, Any]:
        full_layer_name, model = given["full_layer_name"], given["model"]
        owner, _, key = full_layer_name.rpartition(".")
        dtype = getattr(model.get_submodule(owner), key).dtype
        grouped: dict[str, dict[str, list[Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            ends = sorted((end for end in self.hf_quantizer.ends if pattern.endswith(end)), key=len)
            if ends:
                listed = tensors if isinstance(tensors, list) else [tensors]
                grouped.setdefault(pattern.removesuffix(ends[-1]), {})[ends[-1]] = listed
        input_dict.clear()
        if grouped.keys() == {""}:
            parts = {end: tensors[0] for end, tensors in grouped[""].items()}
            return {full_layer_name: self.hf_quantizer.value(parts, is_expert=False).to(dtype)}
        return {f"{stem}weight": self._several(grouped.pop(stem), dtype) for stem in list(grouped)}

    def _several(self, parts: dict[str, list[Tensor]], dtype: torch.dtype) -> Tensor | list[Tensor]:
        """The matrices of a list, such as a layer's experts: a stack [n, ...] if it is merged next."""
        counts = {end: len(tensors) for end, tensors in parts.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"unequal numbers of tensors: {counts}")
        values: list[Tensor] = []
        stack: Tensor | None = None
        for place in range(next(iter(counts.values()))):
            of_matrix = {end: tensors[place] for end, tensors in parts.items()}
            value = self.hf_quantizer.value(of_matrix, is_expert=True).to(dtype)
            if not self.merges:
                values.append(value)
                continue
            if stack is None:
                stack = value.new_empty((next(iter(counts.values())), *value.shape))
            stack[place] = value
            for tensors in parts.values():
                tensors[place] = value.new_empty(0)  # its bytes are not needed any more
        return values if stack is None else stack

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError("exports are not quantized")


# Formats --------------------------------------------------------------------------------------------------------------


class _Mxfp4(Quantizer):
    """Experts of 4-bit floats [n, out, groups, 16 bytes], each group of 32 with an exponent; loaded as [n, in, out]."""

    serialized_names = _names_of(Mxfp4HfQuantizer)

    def value(self, parts: Parts, *, is_expert: bool) -> Tensor:
        named = {end.rpartition("_")[2]: part for end, part in parts.items()}
        if named.keys() != {"blocks", "scales"}:
            raise ValueError(f"{' and '.join(sorted(parts)) or 'nothing'} without its companion")
        blocks, exponents = named["blocks"], named["scales"].to(torch.int32) - 127
        if blocks.shape[:-1] != exponents.shape:
            raise ValueError(f"blocks {tuple(blocks.shape)} and scales {tuple(exponents.shape)} do not fit")
        count, rows, groups, nbytes = blocks.shape
        whole = torch.empty(count, groups * nbytes * 2, rows, device=blocks.device)
        for place in range(count):
            values = _looked_up(blocks[place], _FP4, bits=4)
            values *= torch.pow(2.0, exponents[place].unsqueeze(-1))  # what `ldexp` computes, without its copies
            whole[place] = values.view(rows, -1).T
        return whole


class _Fp8(Quantizer, FineGrainedFP8HfQuantizer):
    """Matrices of 8-bit floats, or 4-bit ones two to a byte, with a scale for each block, or one for all."""

    serialized_names = _names_of(FineGrainedFP8HfQuantizer)

    def value(self, parts: Parts, *, is_expert: bool) -> Tensor:
        weight, scales = parts["weight"], parts.get("weight_scale_inv")
        if scales is None:
            return _plain(weight)
        is_fp4 = weight.dtype in (torch.int8, getattr(torch, "float4_e2m1fn_x2", torch.int8))
        values = _looked_up(weight, _FP4, bits=4) if is_fp4 else weight.to(torch.float32)
        # E8M0 is a power of two; some files declare its byte as an integer
        factors = (scales.to(torch.float32) - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()
        return _scaled(values, factors, self.fields.get("weight_block_size", (128, 128)))


class _CompressedTensors(Quantizer):
    """Integers packed into int32, or integers or 8-bit floats as they are, with scales by tensor, row, group or
    block, and with zero points or without."""

    serialized_names = _names_of(CompressedTensorsHfQuantizer)
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")

    @classmethod
    def _groups(cls, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The arguments of the weights of each group of modules, with the group's format."""
        groups = (fields.get("config_groups") or {}).values()
        return [
            {"format": group.get("format") or fields.get("format"), **group["weights"]}
            for group in groups
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
        ]

    @classmethod
    def refusal(cls, fields: Mapping[str, Any]) -> str:
        groups = cls._groups(fields)
        for group in groups:
            if group["format"] not in cls.formats or group.get("strategy") == "tensor_group":
                return f"compressed-tensors in the format {group['format']}"
            if group.get("actorder") in (True, "group"):
                return "compressed-tensors with columns in another order (actorder: group)"
        widths = {group.get("num_bits") for group in groups if group["format"] == "pack-quantized"}
        if widths and widths not in ({2}, {4}, {8}):
            return f"compressed-tensors of {' and '.join(sorted(map(str, widths)))} bits"
        sparsity = fields.get("sparsity_config") or {}
        if sparsity and sparsity.get("format") not in (None, "dense"):
            return f"compressed-tensors with sparse weights ({sparsity.get('format')})"
        return "" if groups else "compressed-tensors without config_groups"

    @property
    def name(self) -> str:
        kinds = {f"{group.get('type', 'int')}{group.get('num_bits')}" for group in self._groups(self.fields)}
        return f"compressed-tensors {' and '.join(sorted(kinds))}"

    def value(self, parts: Parts, *, is_expert: bool) -> Tensor:
        scales, packed = parts.get("weight_scale"), parts.get("weight_packed")
        if scales is None or (packed is None and "weight" not in parts):
            return _plain(parts.get("weight"))
        stored = parts["weight"] if packed is None else packed
        values = stored.to(torch.float32) if packed is None else self._unpacked(packed, parts, scales)
        if (zeros := parts.get("weight_zero_point")) is not None:
            values = _by_blocks(values, self._zeros(zeros, values, scales), self._block, Tensor.sub_)
        values = _scaled(values, scales.float(), self._block)
        if is_expert and stored.dtype in _FLOAT8:
            return values  # as transformers: merged 8-bit floats are the only ones not rounded to the scale's dtype
        return values.copy_(values.to(scales.dtype))

    @property
    def _bits(self) -> int:
        packed = (group for group in self._groups(self.fields) if group["format"] == "pack-quantized")
        return int(next(packed)["num_bits"])

    @property
    def _block(self) -> Sequence[int] | None:
        blocks = [group.get("block_structure") for group in self._groups(self.fields)]
        return next((block for block in blocks if isinstance(block, list | tuple)), None)

    def _unpacked(self, packed: Tensor, parts: Parts, scales: Tensor) -> Tensor:
        """Packed integers [rows, words] as float32 [rows, columns]."""
        values = _unpack(packed, self._bits)
        shape = parts.get("weight_shape")
        if shape is not None and not shape.is_meta:
            return values[..., : int(shape[-1])].contiguous()
        size = next((group.get("group_size") for group in self._groups(self.fields) if group.get("group_size")), None)
        is_grouped = size and scales.dim() > 1 and scales.shape[-1] > 1  # the check before loading has no values
        return values[..., : scales.shape[-1] * int(size)] if is_grouped and size else values

    def _zeros(self, zeros: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        """Zero points in the scales' shape: integers that are packed along the rows, or as they are."""
        if zeros.dtype == torch.int32 and scales.dim() > 1:
            return _unpack(zeros.T.contiguous(), self._bits)[:, : values.shape[-2]].T
        return zeros.to(torch.float32)


_KINDS: dict[str, type[Quantizer]] = {
    "mxfp4": _Mxfp4,
    "fp8": _Fp8,
    "mxfp8": _Fp8,
    "compressed-tensors": _CompressedTensors,
}


# Arithmetic -----------------------------------------------------------------------------------------------------------


def _plain(weight: Tensor | None) -> Tensor:
    if weight is None or weight.dtype in _FLOAT8 or not weight.is_floating_point():
        raise ValueError("quantized values without a scale")
    return weight


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Integers [rows, words] of `32 / bits` values each, lowest bits first, with an offset, as float32 [rows, n]."""
    return _looked_up(packed, range(-(1 << bits - 1), 1 << bits - 1), bits=bits)


def _looked_up(packed: Tensor, table: Sequence[float], *, bits: int) -> Tensor:
    """The float32 values of codes of so many bits, lowest first in each byte: [..., n] -> [..., codes of n]."""
    codes = torch.arange(256).unsqueeze(-1) >> torch.arange(0, 8, bits) & (1 << bits) - 1
    of_byte = torch.tensor(table, dtype=torch.float32)[codes].to(packed.device)  # [256, codes in a byte]
    content = packed.contiguous().view(torch.uint8)
    values = of_byte.index_select(0, content.reshape(-1).to(torch.int32))
    return values.view(*content.shape[:-1], content.shape[-1] * (8 // bits))


def _scaled(values: Tensor, scales: Tensor, block: Sequence[int] | None) -> Tensor:
    """Float32 matrices [..., rows, columns] times the scale of each block; overwrites `values`."""
    return _by_blocks(values, scales, block, Tensor.mul_)


def _by_blocks(values: Tensor, operands: Tensor, block: Sequence[int] | None, operate: Any) -> Tensor:
    """Matrices [..., rows, columns] changed in place by an operand for each block [..., rows of blocks, columns of
    blocks], for each row, or for all.

    block: the size of a block, whose last ones may be cut. Other grids must divide the matrix evenly.
    """
    if operands.numel() == 1:
        return operate(values, operands.reshape(()))  # type: ignore[no-any-return]
    rows, columns = values.shape[-2:]
    if operands.dim() == values.dim() - 1:
        operands = operands.unsqueeze(-1)
    grid = tuple(operands.shape[-2:])
    if block is None or grid != (-(-rows // block[0]), -(-columns // block[1])):
        if rows % grid[0] or columns % grid[1]:
            raise ValueError(f"a weight of {rows} x {columns} and scales of {grid[0]} x {grid[1]} do not fit")
        block = (rows // grid[0], columns // grid[1])
    by_row = operands.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    whole, rest = divmod(columns, block[1])
    if whole:
        even = values[..., : whole * block[1]].unflatten(-1, (whole, block[1]))
        operate(even, by_row[..., :whole, None])
    if rest:
        operate(values[..., whole * block[1] :], by_row[..., whole:])
    return values
