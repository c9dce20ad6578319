"""AlgoPerf's workloads: each model stands in one repository, in PyTorch and in Linen."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.public_ports.programs import (
    Pair,
    Program,
    Source,
    import_package,
    in_torch,
    integers,
    normal,
    stub,
    to_nhwc,
    weighted,
)

REPOSITORY = "mlcommons/algorithmic-efficiency"
TESTS = "modeldiffs/{} prints the outputs' difference"
CLASSES = {"imagenet_vit": "imagenet", "fastmri": "fastmri", "ogbg": "ogbg", "wmt": "wmt",
           "criteo1tb": "criteo1tb", "librispeech_conformer": "librispeech"}  # fmt: skip


def path(workload: str, framework: str) -> str:
    return f"algoperf/workloads/{workload}/{CLASSES[workload]}_{framework}/models.py"


def models(workload: str, framework: str) -> Any:
    """The module of a workload's models; what it imports beside is data and logging."""
    stub("algoperf._version", "tensorflow", "tensorflow_datasets", "pynvml", "psutil", "GPUtil",
         "clu", "torchvision", "wandb")  # fmt: skip
    return import_package(REPOSITORY, path(workload, framework)[:-3].replace("/", "."))


def in_linen(make: Callable[[], Any], first: Callable[[], tuple], arguments: Callable[[Any], tuple],
             after: Callable[[Any], Any] = lambda x: x,
             **flags: Any) -> Program:  # fmt: skip
    """A Linen module.

    Args:
        first: inputs for `init`.
        arguments: those of a batch.
        after: of the output.
    """
    import jax

    module = make()

    def build(seed: int) -> Any:
        init = jax.jit(lambda key: module.init(key, *first(), **flags))
        return dict(init(jax.random.PRNGKey(seed)))

    def loss(model: Any, batch: Any) -> Any:
        return weighted(after(module.apply(model, *arguments(batch), **flags)))

    return Program(build, loss)


# --- Vision Transformer

SMALL_VIT = {"num_classes": 7, "patch_size": (4, 4), "width": 16, "depth": 2, "mlp_dim": 24,
             "num_heads": 2, "head_zeroinit": False}  # fmt: skip


def images(step: int) -> np.ndarray:
    return normal(step, 2, 3, 16, 16)


def vit_in_torch(**variant: bool) -> Program:
    made = models("imagenet_vit", "pytorch")
    return in_torch(lambda: made.ViT(**SMALL_VIT, **variant),
                    lambda model, x: model(x, dropout_rate=0.0), images)  # fmt: skip


def vit_in_linen(**variant: bool) -> Program:
    made = models("imagenet_vit", "jax")
    return in_linen(lambda: made.ViT(**SMALL_VIT, **variant), lambda: (to_nhwc(images(0)),),
                    lambda x: (to_nhwc(x),), train=False, dropout_rate=0.0)  # fmt: skip


# --- U-Net


def scans(step: int) -> np.ndarray:
    return normal(step, 2, 16, 16)


def unet_in_torch(**variant: bool) -> Program:
    made = models("fastmri", "pytorch")
    return in_torch(lambda: made.UNet(num_channels=4, num_pool_layers=2, **variant),
                    lambda model, x: model(x[:, None], dropout_rate=0.0), scans)  # fmt: skip


def unet_in_linen(**variant: bool) -> Program:
    made = models("fastmri", "jax")
    return in_linen(lambda: made.UNet(num_channels=4, num_pool_layers=2, **variant),
                    lambda: (scans(0),), lambda x: (x,), train=False, dropout_rate=0.0,
                    after=lambda x: x[:, None])  # fmt: skip


# --- graph network

SMALL_GNN = {"num_outputs": 5, "latent_dim": 8, "hidden_dims": (8,),
             "num_message_passing_steps": 2}  # fmt: skip


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

    return jraph.GraphsTuple(**batch, globals=None)


def gnn_in_torch(activation: str) -> Program:
    made = models("ogbg", "pytorch")
    return in_torch(lambda: made.GNN(activation_fn_name=activation, **SMALL_GNN),
                    lambda model, x: model(as_graph(x), dropout_rate=0.0), graphs)  # fmt: skip


def gnn_in_linen(activation: str) -> Program:
    made = models("ogbg", "jax")
    return in_linen(lambda: made.GNN(activation_fn_name=activation, **SMALL_GNN),
                    lambda: (as_graph(graphs(0)),), lambda x: (as_graph(x),), train=False,
                    dropout_rate=0.0)  # fmt: skip


# --- recommendation

# The interaction's width is fixed at 128 in PyTorch.
DLRM = {"vocab_size": 32, "mlp_bottom_dims": (16, 8, 128), "mlp_top_dims": (16, 8, 1)}
DLRM_RESNET = {"vocab_size": 32, "mlp_bottom_dims": (8, 8, 8), "mlp_top_dims": (16, 16, 1),
               "embed_dim": 8}  # fmt: skip


def clicks(step: int) -> np.ndarray:
    """13 figures and 26 categories."""
    both = [normal(step, 4, 13), integers(step, 32, 4, 26)]
    return np.concatenate(both, axis=1, dtype=np.float32)


def dlrm_in_torch(name: str = "DlrmSmall", **variant: bool) -> Program:
    made = models("criteo1tb", "pytorch")
    sizes = DLRM_RESNET if name == "DLRMResNet" else DLRM
    return in_torch(lambda: getattr(made, name)(**sizes, **variant),
                    lambda model, x: model(x, 0.0), clicks)  # fmt: skip


def dlrm_in_linen(name: str = "DlrmSmall", **variant: bool) -> Program:
    made = models("criteo1tb", "jax")
    sizes = DLRM_RESNET if name == "DLRMResNet" else DLRM
    return in_linen(lambda: getattr(made, name)(**sizes, **variant), lambda: (clicks(0),),
                    lambda x: (x,), train=False, dropout_rate=0.0)  # fmt: skip


# --- translation


def sentences(step: int) -> list[np.ndarray]:
    """Two pairs of sentences, some of them padded by 0."""
    pair = [1 + integers(step + k, 19, 2, 8) for k in (0, 1000)]
    pair[0][0, 6:] = pair[1][1, 5:] = 0
    return pair


def wmt_in_torch(tanh: bool = False, **variant: Any) -> Program:
    import torch

    made = models("wmt", "pytorch")
    activation = torch.tanh if tanh else torch.nn.functional.relu
    return in_torch(
        lambda: made.Transformer(ntoken=20, d_model=16, nhead=2, d_hid=16, nlayers=2,
                                 activation=activation, **variant),
        lambda model, x: model(*x, dropout_rate=0.0) * (x[1] > 0)[..., None], sentences,
    )  # fmt: skip


def wmt_in_linen(tanh: bool = False, **variant: Any) -> Program:
    import jax

    made = models("wmt", "jax")
    config = made.TransformerConfig(
        vocab_size=20, emb_dim=16, num_heads=2, num_layers=2, qkv_dim=16, mlp_dim=16,
        activation=jax.numpy.tanh if tanh else jax.nn.relu, deterministic=True, **variant,
    )  # fmt: skip
    program = in_linen(lambda: made.Transformer(config), lambda: tuple(sentences(0)), tuple,
                       dropout_rate=0.0)  # fmt: skip

    def loss(model: Any, batch: Any) -> Any:
        output = made.Transformer(config).apply(model, *batch, dropout_rate=0.0)
        return weighted(output * (batch[1] > 0)[..., None])

    return program._replace(loss=loss)


# --- speech

CONFORMER = {"vocab_size": 11, "encoder_dim": 16, "num_attention_heads": 2,
             "num_encoder_layers": 1, "use_specaug": False}  # fmt: skip


def waves(step: int) -> list[np.ndarray]:
    """Two sounds, one of them padded, and where they are."""
    padding = np.zeros((2, 4000), np.float32)
    padding[1, 3000:] = 1
    return [normal(step, 2, 4000), padding]


def conformer_in_torch(**variant: Any) -> Program:
    made = models("librispeech_conformer", "pytorch")

    def make() -> Any:
        model = made.ConformerEncoderDecoder(made.ConformerConfig(**CONFORMER, **variant))
        made.initialize(model)
        return model.eval()

    def call(model: Any, batch: Any) -> Any:
        output, padding = model(*batch, dropout_rate=0.0)
        return output * (1 - padding[..., None])

    return in_torch(make, call, waves)


def conformer_in_linen(**variant: Any) -> Program:
    made = models("librispeech_conformer", "jax")
    config = made.ConformerConfig(**CONFORMER, **variant)
    return in_linen(
        lambda: made.Conformer(config), lambda: tuple(waves(0)), tuple, train=False,
        dropout_rate=0.0, after=lambda found: found[0] * (1 - found[1][..., None]),
    )  # fmt: skip


def pair(
    name: str, workload: str, sides: tuple[Callable[..., Program], Callable[..., Program]],
    own: str, given: dict[str, Any] | None = None, **known: Any,
) -> Pair:  # fmt: skip
    """A workload, or a variant of it.

    Args:
        own: the folder of its own test.
        given: what makes the variant.
    """
    reference, port = sides
    return Pair(
        f"algoperf {name}", Source(REPOSITORY, path(workload, "pytorch")),
        Source(REPOSITORY, path(workload, "jax")),
        (lambda: reference(**(given or {})), lambda: port(**(given or {}))),
        own_tests=TESTS.format(own), **known,
    )  # fmt: skip


VIT, UNET = (vit_in_torch, vit_in_linen), (unet_in_torch, unet_in_linen)
GNN = (gnn_in_torch, gnn_in_linen)
DLRMS, WMT = (dlrm_in_torch, dlrm_in_linen), (wmt_in_torch, wmt_in_linen)
CONVERTED = "run in float64, the weights converted by their test"
EQUAL: dict[str, Any] = {"differs": False, "by_hand": CONVERTED}
TABLE: dict[str, Any] = {  # of positions
    "differs": False,
    "by_hand": f"{CONVERTED}; both make a table in float32, and round it apart",
}
PAIRS = [
    pair("vit", "imagenet_vit", VIT, "imagenet_vit", **TABLE),
    pair("vit, gated", "imagenet_vit", VIT, "imagenet_vit_glu", {"use_glu": True}, **TABLE),
    pair("vit, attention pooling", "imagenet_vit", VIT, "imagenet_vit_map", {"use_map": True},
         **TABLE),
    pair("vit, norm after", "imagenet_vit", VIT, "imagenet_vit_postln",
         {"use_post_layer_norm": True}, differs=True, by_hand="run",
         why="the port ends with TypeError: it calls an array, where it drops out"),
    pair("u-net", "fastmri", UNET, "fastmri", **EQUAL),
    pair("u-net, tanh", "fastmri", UNET, "fastmri_tanh", {"use_tanh": True}, **EQUAL),
    pair("u-net, layer norm", "fastmri", UNET, "fastmri_layernorm", {"use_layer_norm": True},
         **EQUAL),
    *(pair(f"graph network, {name}", "ogbg", GNN, own, {"activation": name}, **EQUAL)
      for name, own in (("relu", "ogbg"), ("gelu", "ogbg_gelu"), ("silu", "ogbg_silu"))),
    pair("dlrm", "criteo1tb", DLRMS, "criteo1tb"),
    pair("dlrm, layer norm", "criteo1tb", DLRMS, "criteo1tb_layernorm", {"use_layer_norm": True}),
    pair("dlrm, residual", "criteo1tb", DLRMS, "criteo1tb_resnet", {"name": "DLRMResNet"}),
    pair("translation", "wmt", WMT, "wmt", **TABLE),
    pair("translation, norm after", "wmt", WMT, "wmt_post_ln", {"pre_ln": False}, **TABLE),
    pair("translation, temperature", "wmt", WMT, "wmt_attention_temp", {"attention_temp": 4.0},
         **TABLE),
    pair("translation, gated, tanh", "wmt", WMT, "wmt_glu_tanh", {"glu": True, "tanh": True},
         **TABLE),
    pair("conformer", "librispeech_conformer", (conformer_in_torch, conformer_in_linen),
         "librispeech_conformer"),
]  # fmt: skip
