"""AlgoPerf's workloads: each model stands in one repository, in PyTorch and in Linen."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    import_package,
    in_linen,
    in_torch,
    integers,
    normal,
    stub,
    to_nhwc,
)

REPOSITORY = "mlcommons/algorithmic-efficiency"
Sizes = dict[str, Any]


class Workload(NamedTuple):
    """A model in both frameworks, and what it takes."""

    folder: str
    data: str  # the first half of its folders' names
    model: str
    sizes: Sizes
    batch: Callable[[int], Any]
    # A batch -> the arguments of each framework's model.
    torch_inputs: Callable[[Any], tuple[Any, ...]] = lambda batch: (batch,)
    linen_inputs: Callable[[Any], tuple[Any, ...]] = lambda batch: (batch,)
    linen_output: Callable[[Any, Any], Any] = lambda output, batch: output

    def path(self, framework: str) -> str:
        return f"algoperf/workloads/{self.folder}/{self.data}_{framework}/models.py"

    def models(self, framework: str) -> Any:
        """The module of a framework's models; what it imports beside is data and logging."""
        stub("algoperf._version", "tensorflow", "tensorflow_datasets", "pynvml", "psutil",
             "GPUtil", "clu", "torchvision", "wandb")  # fmt: skip
        return import_package(REPOSITORY, self.path(framework)[:-3].replace("/", "."))


def images(step: int) -> np.ndarray:
    return normal(step, 2, 3, 16, 16)


def scans(step: int) -> np.ndarray:
    return normal(step, 2, 16, 16)


def graphs(step: int) -> dict[str, np.ndarray]:
    """Two graphs of four nodes and six edges each."""
    ends = integers(step, 4, 2, 12) + np.repeat([0, 4], 6)
    return {
        "nodes": normal(step, 8, 9), "edges": normal(step + 1000, 12, 3),
        "senders": ends[0], "receivers": ends[1],
        "n_node": np.array([4, 4]), "n_edge": np.array([6, 6]),
    }  # fmt: skip


def as_graph(batch: dict[str, Any]) -> Any:
    import jraph

    return (jraph.GraphsTuple(**batch, globals=None),)


def clicks(step: int) -> np.ndarray:
    """13 figures and 26 categories."""
    both = [normal(step, 4, 13), integers(step, 32, 4, 26)]
    return np.concatenate(both, axis=1, dtype=np.float32)


def sentences(step: int) -> list[np.ndarray]:
    """Two pairs of sentences, some of them padded by 0."""
    pair = [1 + integers(step + k, 19, 2, 8) for k in (0, 1000)]
    pair[0][0, 6:] = pair[1][1, 5:] = 0
    return pair


VIT = Workload(
    "imagenet_vit", "imagenet", "ViT",
    {"num_classes": 7, "patch_size": (4, 4), "width": 16, "depth": 2, "mlp_dim": 24,
     "num_heads": 2, "head_zeroinit": False},
    images, linen_inputs=lambda x: (to_nhwc(x),),
)  # fmt: skip
UNET = Workload(
    "fastmri", "fastmri", "UNet", {"num_channels": 4, "num_pool_layers": 2}, scans,
    torch_inputs=lambda x: (x[:, None],), linen_output=lambda x, batch: x[:, None],
)  # fmt: skip
GNN = Workload(
    "ogbg", "ogbg", "GNN",
    {"num_outputs": 5, "latent_dim": 8, "hidden_dims": (8,), "num_message_passing_steps": 2},
    graphs, as_graph, as_graph,
)  # fmt: skip
DLRM = Workload(
    "criteo1tb", "criteo1tb", "DlrmSmall",
    # The interaction's width is fixed at 128 in PyTorch.
    {"vocab_size": 32, "mlp_bottom_dims": (16, 8, 128), "mlp_top_dims": (16, 8, 1)}, clicks,
)  # fmt: skip
DLRM_RESNET = DLRM._replace(
    model="DLRMResNet",
    sizes={"vocab_size": 32, "mlp_bottom_dims": (8, 8, 8), "mlp_top_dims": (16, 16, 1),
           "embed_dim": 8},
)  # fmt: skip
WMT = Workload("wmt", "wmt", "Transformer", {}, sentences)


def sides(load: Workload, variant: Sizes) -> tuple[Callable[[], Program], Callable[[], Program]]:
    """Both programs of a workload without dropout.

    Args:
        variant: further arguments of both models.
    """
    arguments = load.sizes | variant

    def of_torch() -> Program:
        model = getattr(load.models("pytorch"), load.model)

        def call(module: Any, batch: Any) -> Any:
            return module(*load.torch_inputs(batch), dropout_rate=0.0)

        return in_torch(lambda: model(**arguments), call, load.batch)

    def of_linen() -> Program:
        module = getattr(load.models("jax"), load.model)(**arguments)
        return in_linen(module, load.batch, load.linen_inputs, load.linen_output,
                        train=False, dropout_rate=0.0)  # fmt: skip

    return of_torch, of_linen


def translations(tanh: bool = False, **variant: Any) -> tuple[Callable, Callable]:
    """The Transformer's two programs; outputs at padding do not count."""

    def of_torch() -> Program:
        import torch

        model = WMT.models("pytorch").Transformer
        activation = torch.tanh if tanh else torch.nn.functional.relu
        return in_torch(
            lambda: model(ntoken=20, d_model=16, nhead=2, d_hid=16, nlayers=2,
                          activation=activation, **variant),
            lambda module, x: module(*x, dropout_rate=0.0) * (x[1] > 0)[..., None], sentences,
        )  # fmt: skip

    def of_linen() -> Program:
        import jax

        made = WMT.models("jax")
        config = made.TransformerConfig(
            vocab_size=20, emb_dim=16, num_heads=2, num_layers=2, qkv_dim=16, mlp_dim=16,
            activation=jax.numpy.tanh if tanh else jax.nn.relu, deterministic=True, **variant,
        )  # fmt: skip
        return in_linen(made.Transformer(config), sentences, tuple,
                        lambda output, batch: output * (batch[1] > 0)[..., None],
                        dropout_rate=0.0)  # fmt: skip

    return of_torch, of_linen


def pair(name: str, load: Workload, own: str, programs: Any = None, variant: Sizes | None = None,
         **known: Any) -> Pair:  # fmt: skip
    """A workload, or a variant of it.

    Args:
        own: the folder of its own test.
    """
    return Pair(
        f"algoperf {name}", Source(REPOSITORY, load.path("pytorch")),
        Source(REPOSITORY, load.path("jax")), programs or sides(load, variant or {}),
        own_tests=f"modeldiffs/{own} prints the outputs' difference", **known,
    )  # fmt: skip


CONVERTED = "run in float64, the weights converted by their test"
EQUAL: dict[str, Any] = {"differs": False, "by_hand": CONVERTED}
TABLE: dict[str, Any] = {  # of positions
    "differs": False,
    "by_hand": f"{CONVERTED}; both make a table in float32, and round it apart",
}
PAIRS = [
    pair("vit, norm after", VIT, "imagenet_vit_postln", variant={"use_post_layer_norm": True},
         differs=True, by_hand="run",
         why="the port ends with TypeError: it calls an array, where it drops out"),
    pair("u-net, layer norm", UNET, "fastmri_layernorm", variant={"use_layer_norm": True},
         **EQUAL),
    *(pair(f"graph network, {name}", GNN, own, variant={"activation_fn_name": name}, **EQUAL)
      for name, own in (("relu", "ogbg"), ("gelu", "ogbg_gelu"), ("silu", "ogbg_silu"))),
    pair("dlrm", DLRM, "criteo1tb"),
    pair("dlrm, layer norm", DLRM, "criteo1tb_layernorm", variant={"use_layer_norm": True}),
    pair("dlrm, residual", DLRM_RESNET, "criteo1tb_resnet"),
    pair("translation", WMT, "wmt", translations(), **TABLE),
    pair("translation, norm after", WMT, "wmt_post_ln", translations(pre_ln=False), **TABLE),
    pair("translation, temperature", WMT, "wmt_attention_temp", translations(attention_temp=4.0),
         **TABLE),
    pair("translation, gated, tanh", WMT, "wmt_glu_tanh", translations(glu=True, tanh=True),
         **TABLE),
]  # fmt: skip
