"""The forward pass in ONNX, for `lockstep.weights.onnx_export`, which knows no torch."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lockstep.config import Config, ModelConfig
from lockstep.data.batch import Batch
from lockstep.weights.forward import WEIGHTS
from lockstep.weights.onnx_export import FILE, INPUT, OUTPUT

from ..model import GPT

OPSET = 20  # of the operations that onnxruntime quantizes


class Forward(GPT):
    """The core's model, of tokens (B, T) alone."""

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(Batch(tokens, tokens))


def export(config: ModelConfig, weights: dict[str, Tensor]) -> Any:
    """Export a model in float32: tokens (B, T) int64 -> logits (B, T, V) float32.

    B and T are free, T up to the context.

    Args:
        weights: by canonical name.

    Returns:
        An `onnx.ModelProto`, without the places in our code that its nodes come from.
    """
    model = Forward(config).eval()
    model.load_state_dict(weights)
    sizes = {0: torch.export.Dim("B"), 1: torch.export.Dim("T", max=config.context)}
    program = torch.onnx.export(
        model, (torch.zeros(2, 2, dtype=torch.int64),), dynamo=True, opset_version=OPSET,
        input_names=[INPUT], output_names=[OUTPUT], dynamic_shapes={INPUT: sizes}, verbose=False,
    )  # fmt: skip
    assert program
    proto = program.model_proto
    for each in (proto.graph, *proto.graph.node, *proto.graph.value_info):
        each.ClearField("metadata_props")
    return proto


def export_forward(config: dict[str, Any], folder: str) -> None:
    """Write the graph beside the canonical weights."""
    weights = load_file(Path(folder, WEIGHTS))
    proto = export(Config.from_json(config).model, weights)
    Path(folder, FILE).write_bytes(proto.SerializeToString())
