"""A run's checkpoint -> a folder with model.onnx, which onnxruntime runs, in float32 or in int8.

int8 has one scale for each output of a weight, and one for each activation, set on the run's text.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import Config
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch
from lockstep.errors import require
from lockstep.extras import require_framework, require_package
from lockstep.model import params
from lockstep.run import directory
from lockstep.weights.forward import WEIGHTS, exported

FILE, INPUT, OUTPUT = "model.onnx", "tokens", "logits"
LARGEST = 2**31 - 2**20  # bytes of a protobuf, less what is no weight
CALIBRATION = 8  # steps whose windows say how large each activation is


class Exported(NamedTuple):
    """Sizes and losses of an export.

    Args:
        bytes: of the file.
        loss: the mean in nats on the run's validation text.
        float32_bytes: of the file before it was quantized, if it was.
        float32_loss: the same.
    """

    bytes: int
    loss: float
    float32_bytes: int
    float32_loss: float

    def text(self, to: Path) -> str:
        sizes = f"{self.bytes / 1e6:.1f} MB, validation loss {self.loss:.5f}"
        if self.bytes == self.float32_bytes:
            return f"{to / FILE}: {sizes}"
        former = f"{self.float32_bytes / 1e6:.1f} MB, {self.float32_loss:.5f}"
        return f"{to / FILE} in int8: {sizes}; in float32 {former}"


def export_onnx(
    run: Path, to: Path, *, step: int | None, int8: bool, warn: Callable[[str], None]
) -> Exported:
    """Export the PyTorch twin's forward pass.

    Raises:
        UserError: as `exported`; or the run's text is damaged, a package is not installed, or the
            model is too large for one file.
    """
    for module in ("onnx", "onnxruntime", "onnxscript"):
        require_package("--format onnx", module, "onnx")
    require_framework("torch")
    config = directory.read_record(run).config
    size = 4 * params.count(config.model.base)
    require(size < LARGEST, "--format", "onnx", "the model is over 2 GB; use safetensors")
    data = corpus.load(**vars(config.data))
    corpus.check(data, config.model.vocab, config.model.context)
    held_out = read_held_out(config, data)
    with exported(run, to, "torch_ref.io.onnx", step=step, warn=warn) as folder:
        file = folder / FILE
        (folder / WEIGHTS).unlink()
        was = file.stat().st_size, mean_loss(run_file(file), held_out)
        if int8:
            quantize(file, calibration(config, data.train))
        now = (file.stat().st_size, mean_loss(run_file(file), held_out)) if int8 else was
    return Exported(*now, *was)


def read_held_out(config: Config, data: corpus.Corpus) -> Batch:
    """Draw the windows (M, B, T) of an evaluation. The exported program sees all that is before a
    token in its row, so rows that pack several documents become rows of one each."""
    held_out = batches.validation(config, data.val)
    if held_out.segments is None:
        return held_out
    alone = corpus.load(**vars(config.data) | {"rows": "pad"})
    return batches.validation(config, alone.val)


def calibration(config: Config, train: Any) -> Iterator[np.ndarray]:
    """Draw the windows (B, T) of the run's first steps."""
    for step in range(CALIBRATION):
        yield from batches.of_step(config, train, step).tokens.astype(np.int64)


def quantize(file: Path, windows: Iterator[np.ndarray]) -> None:
    """Quantize in place the weights of linear layers, and the rows that they multiply."""
    from onnxruntime import quantization

    class Windows(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            tokens = next(windows, None)
            return None if tokens is None else {"tokens": tokens}

    logging.getLogger().addFilter(lambda record: "pre-processing" not in record.getMessage())
    kinds = quantization.QuantType
    quantization.quantize_static(
        file, file, Windows(), quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=["Gemm"], per_channel=True, activation_type=kinds.QUInt8,
        weight_type=kinds.QInt8,
    )  # fmt: skip


def mean_loss(logits: Callable[[np.ndarray], np.ndarray], window: Batch) -> float:
    """Compute the cross-entropy in nats, as `Twin.evaluate`, of what counts as a target.

    Args:
        logits: tokens (B, T) -> (B, T, V).
    """
    total, count = 0.0, 0
    for batch in window.split():
        wide = logits(batch.tokens).astype(np.float64)
        top = wide.max(-1, keepdims=True)
        log_sums = np.log(np.exp(wide - top).sum(-1)) + top[..., 0]
        counts = batch.expand_counts()
        chosen = np.take_along_axis(wide, batch.targets[..., None], -1)[..., 0]
        total += float((log_sums - chosen)[counts].sum())
        count += int(counts.sum())
    return total / max(1, count)


def run_file(file: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Load a model for the CPU: tokens (B, T) -> logits (B, T, V)."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda tokens: session.run(None, {"tokens": tokens.astype(np.int64)})[0]
