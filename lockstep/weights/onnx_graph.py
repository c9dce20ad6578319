"""The model as an ONNX graph: tokens (B, T) int64 -> logits (B, T, V) float32, T up to the context.

It is written from the configuration and the canonical weights, so that it is the same for a run of
either twin. Opset 20, in operations that onnxruntime quantizes.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from lockstep.config import ModelConfig
from lockstep.config.rope import parse_rope
from lockstep.model import rotary
from lockstep.model.params import Arrays

OPSET, IR = 20, 10
INPUT, OUTPUT = "tokens", "logits"


def build(model: ModelConfig, params: Arrays) -> onnx.ModelProto:
    """Weights of a run -> its graph, in float32. Rows that pad the vocabulary are left out."""
    graph = Graph(model, params)
    graph.write()
    tokens = helper.make_tensor_value_info(INPUT, TensorProto.INT64, ["B", "T"])
    logits = helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["B", "T", model.vocab])
    made = helper.make_graph(graph.nodes, "lockstep", [tokens], [logits], graph.constants)
    opset = helper.make_opsetid("", OPSET)
    built = helper.make_model(made, opset_imports=[opset], ir_version=IR, producer_name="lockstep")
    onnx.checker.check_model(built, full_check=True)
    return built


class Graph:
    """Nodes in the order of the forward pass; each method returns the name of what it computes."""

    def __init__(self, model: ModelConfig, params: Arrays) -> None:
        self.model, self.params = model, params
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.named: set[str] = set()

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """One node; the name of its output, or a list of several."""
        names = [f"{kind.lower()}.{len(self.nodes)}.{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=names[0], **attributes))
        return names if outputs > 1 else names[0]

    def constant(self, name: str, value: Any, dtype: type = np.float32) -> str:
        if name not in self.named:
            self.named.add(name)
            array: np.ndarray = np.ascontiguousarray(np.asarray(value).astype(dtype))
            self.constants.append(numpy_helper.from_array(array, name))
        return name

    def numbers(self, *values: int) -> str:
        return self.constant(f"int64.{values}", values, np.int64)

    def write(self) -> None:
        model = self.model
        time = self.op("Shape", INPUT, start=1, end=2)
        embed = self.constant("embed.weight", self.params["embed.weight"][: model.vocab])
        x = self.op("Gather", embed, INPUT)
        if model.position == "learned":
            x = self.op("Add", x, self.first(self.weight("position"), time))
        hidden = numpy_helper.from_array(np.array([-np.inf], np.float32))
        square = self.op("ConstantOfShape", self.op("Concat", time, time, axis=0), value=hidden)
        mask = self.op("Trilu", square, self.constant("one", 1, np.int64), upper=1)
        for layer in range(model.n_layer):
            block = f"blocks.{layer}"
            x = self.op("Add", x, self.attention(f"{block}.attn", self.norm(f"{block}.norm1", x),
                                                 time, mask))  # fmt: skip
            x = self.op("Add", x, self.mlp(f"{block}.mlp", self.norm(f"{block}.norm2", x)))
        head = "embed.weight" if model.tied else "head.weight"
        weight = self.constant("head.transposed", self.params[head][: model.vocab].T)
        self.nodes.append(helper.make_node("MatMul", [self.norm("norm", x), weight], [OUTPUT]))

    def weight(self, module: str) -> str:
        name = f"{module}.weight"
        return self.constant(name, self.params[name])

    def first(self, table: str, time: str) -> str:
        """Rows up to T."""
        return self.op("Slice", table, self.numbers(0), time, self.numbers(0))

    def linear(self, module: str, x: str) -> str:
        weight = self.constant(f"{module}.transposed", self.params[f"{module}.weight"].T)
        y = self.op("MatMul", x, weight)
        bias = f"{module}.bias"
        return self.op("Add", y, self.constant(bias, self.params[bias])) if self.has(bias) else y

    def has(self, name: str) -> bool:
        return name in self.params

    def norm(self, module: str, x: str) -> str:
        weight, eps = self.weight(module), self.model.norm_eps
        if self.model.norm == "layernorm" and not module.endswith(("q_norm", "k_norm")):
            bias = [self.constant(f"{module}.bias", self.params[f"{module}.bias"])] * self.has(
                f"{module}.bias"
            )
            return self.op("LayerNormalization", x, weight, *bias, axis=-1, epsilon=eps)
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.numbers(-1), keepdims=1)
        shifted = self.op("Add", mean, self.constant("eps", eps))
        return self.op("Mul", self.op("Div", x, self.op("Sqrt", shifted)), weight)

    def attention(self, module: str, x: str, time: str, mask: str) -> str:
        model = self.model
        h, g, k = model.n_head, model.kv_heads, model.d_head
        split = self.numbers(h * k, g * k, g * k)
        q, key, value = self.op("Split", self.linear(f"{module}.qkv", x), split, outputs=3, axis=-1)
        q, key, value = (self.heads(y, n) for y, n in ((q, h), (key, g), (value, g)))
        if model.qk_norm:
            q, key = self.norm(f"{module}.q_norm", q), self.norm(f"{module}.k_norm", key)
        if model.position == "rope":
            q, key = self.rotate(q, time), self.rotate(key, time)
        key, value = self.repeat(key), self.repeat(value)
        scores = self.op("MatMul", q, self.op("Transpose", key, perm=(0, 1, 3, 2)))
        scaled = self.op("Mul", scores, self.constant("scale", k**-0.5))
        probs = self.op("Softmax", self.op("Add", scaled, mask), axis=-1)
        y = self.op("Transpose", self.op("MatMul", probs, value), perm=(0, 2, 1, 3))
        return self.linear(f"{module}.proj", self.reshape(y, 0, 0, h * k))

    def reshape(self, x: str, *sizes: int) -> str:
        """0 keeps a size, -1 is derived."""
        return self.op("Reshape", x, self.numbers(*sizes))

    def heads(self, x: str, count: int) -> str:
        """(B, T, heads K) -> (B, heads, T, K)."""
        split = self.reshape(x, 0, 0, count, self.model.d_head)
        return self.op("Transpose", split, perm=(0, 2, 1, 3))

    def repeat(self, x: str) -> str:
        """(B, G, T, K) -> (B, H, T, K): neighbouring heads of queries share theirs."""
        model = self.model
        times = model.n_head // model.kv_heads
        if times == 1:
            return x
        apart = self.op("Unsqueeze", x, self.numbers(2))
        several = self.op("Concat", *[apart] * times, axis=2)
        shape = self.op("Concat", self.op("Shape", x, end=1), self.numbers(model.n_head),
                        self.op("Shape", x, start=2), axis=0)  # fmt: skip
        return self.op("Reshape", several, shape)

    def rotate(self, x: str, time: str) -> str:
        model = self.model
        tables = rotary.table(model.context, model.d_head, parse_rope(model.rope))
        cos, sin = (self.first(self.constant(name, table), time)
                    for name, table in zip(("cos", "sin"), tables))  # fmt: skip
        half = model.d_head // 2
        left, right = self.op("Split", x, self.numbers(half, half), outputs=2, axis=-1)
        turned = (
            self.op("Sub", self.op("Mul", left, cos), self.op("Mul", right, sin)),
            self.op("Add", self.op("Mul", right, cos), self.op("Mul", left, sin)),
        )
        return self.op("Concat", *turned, axis=-1)

    def mlp(self, module: str, x: str) -> str:
        up = self.linear(f"{module}.up", x)
        if self.model.mlp == "swiglu":
            gate = self.linear(f"{module}.gate", x)
            silu = self.op("Mul", gate, self.op("Sigmoid", gate))
            return self.linear(f"{module}.down", self.op("Mul", silu, up))
        form = "none" if self.model.mlp == "gelu-erf" else "tanh"
        return self.linear(f"{module}.down", self.op("Gelu", up, approximate=form))
