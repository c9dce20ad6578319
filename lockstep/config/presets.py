"""The named models, and the config of a command line."""

import dataclasses
from typing import Any

from lockstep.config.config import Config
from lockstep.config.fields import flag_name
from lockstep.config.model import OF_A_RUN, ModelConfig
from lockstep.errors import require

LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
GPT2: dict[str, Any] = {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True}
BPE = 50_304  # GPT-2's 50,257 tokens, padded to a multiple of 128 for the matmul units

# The sizes of GPT-2 are Radford et al.'s (2019), those of 1.3B Brown et al.'s (2020, "GPT-3 XL")
# with 16 heads of 128, for its 24 do not divide its width.
# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(n_layer=4,  n_head=4,  d_model=128,  context=128,  vocab=256, tied=False, **LLAMA),
    "10m":  dict(n_layer=6,  n_head=6,  d_model=384,  context=256,  vocab=256, tied=False, **LLAMA),
    "30m":  dict(n_layer=9,  n_head=8,  d_model=512,  context=512,  vocab=256, tied=False, **LLAMA),
    "125m": dict(n_layer=12, n_head=12, d_model=768,  context=1024, vocab=BPE, tied=True,  **LLAMA),
    "1b":   dict(n_layer=16, n_head=16, d_model=2048, context=2048, vocab=BPE, tied=False, **LLAMA),
    "gpt2": dict(n_layer=12, n_head=12, d_model=768,  context=1024, vocab=BPE, tied=True,  **GPT2),
    "gpt2-medium": dict(n_layer=24, n_head=16, d_model=1024, context=1024, vocab=BPE, tied=True,
                        **GPT2),
    "gpt2-large":  dict(n_layer=36, n_head=20, d_model=1280, context=1024, vocab=BPE, tied=True,
                        **GPT2),
    "gpt2-xl":     dict(n_layer=48, n_head=25, d_model=1600, context=1024, vocab=BPE, tied=True,
                        **GPT2),
    "gpt3-1.3b":   dict(n_layer=24, n_head=16, d_model=2048, context=2048, vocab=BPE, tied=True,
                        **GPT2),
}
# fmt: on


def from_flags(
    given: dict[str, Any], *, accelerator: bool, model: ModelConfig | None = None
) -> Config:
    """Resolves the config of a user's flags (field name -> value).

    Args:
        given: only what was typed; everything else takes its default here.
        accelerator: decides `--model auto`.
        model: that of `--init`.
    """
    given = dict(given)
    name = given.pop("model", "auto")
    require(name in ("auto", *PRESETS), "--model", name, f"unknown; use auto, {', '.join(PRESETS)}")
    if name == "auto":
        name = "10m" if accelerator else "tiny"
    if "lr" in given:
        given.setdefault("min_lr", given["lr"] / 10)
    if "steps" in given:
        given.setdefault("warmup", max(0, min(100, given["steps"] // 10)))
    sections = {}
    for section in dataclasses.fields(Config):
        names = [f.name for f in dataclasses.fields(section.type)]  # type: ignore[arg-type]
        chosen = {key: given.pop(key) for key in names if key in given}
        if section.name == "model":
            preset = vars(model) if model else {"model": name, **PRESETS[name]}
            chosen = {**preset, **chosen}
        sections[section.name] = section.type(**chosen)  # type: ignore[operator]
    require(not given, "flags", ", ".join(given), "unknown fields")
    return Config(**sections)


def to_flags(config: Config) -> list[str]:
    """Write the command line that a trainer resolves to this config, on any machine.

    Without --mesh it would take all of a machine's devices.
    """
    given: dict[str, Any] = {"steps": config.optim.steps, "lr": config.optim.lr}
    given |= {"mesh": str(config.mesh)}
    model, init = config.model, config.run.init
    given |= {"init": init, "context": model.context} if init else {"model": model.model}
    unsaid = {f.name: f.default for f in dataclasses.fields(model) if f.name in OF_A_RUN}
    bare: Any = {**vars(model), **unsaid, "context": model.context}
    usual = from_flags(given, accelerator=False, model=ModelConfig(**bare) if init else None)
    for section in dataclasses.fields(Config):
        mine, theirs = (vars(getattr(c, section.name)) for c in (config, usual))
        given |= {name: mine[name] for name in mine if mine[name] != theirs[name]}
    pairs = [(flag_name(name), value) for name, value in given.items()]
    return [part for name, v in pairs for part in ([name] if v is True else [name, str(v)])]
