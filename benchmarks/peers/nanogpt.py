"""`examples/minimal/train_torch.py` as a `Runner`: the same weights, batches and rates as ours."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.minimal import Minimal
from examples.minimal import train_torch
from lockstep.config import Config
from lockstep.data.batch import Batch, join_tokens
from lockstep.errors import UserError, require
from lockstep.model.state import TrainState
from lockstep.train.memory import resident_peak
from lockstep.twin import StepResult


class NanoGPT(Minimal):
    """`lockstep.twin.Runner`: `train_torch.train_step`."""

    framework = "nanogpt"

    def __init__(self, config: Config) -> None:
        self.device = find_device(config.run.device)
        self.synchronous = self.device.type == "cpu"
        super().__init__(config, on_cpu=self.synchronous)
        self.minimal = train_torch.Config(**self.options, clip=config.optim.clip)
        with self.device:
            model = train_torch.GPT(self.minimal)
        self.model = model.to(getattr(torch, self.roles.param))
        self.called: Any = torch.compile(self.model) if config.execution.compile else self.model
        self.optimizer = train_torch.make_optimizer(self.model)

    def describe(self) -> dict[str, Any]:
        on_cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
            "platform": self.device.type,
            "attention": "sdpa", "emulated": "", "versions": {"torch": torch.__version__},
        }  # fmt: skip

    def load(self, state: TrainState) -> None:
        self.begin(state)
        self.configure()
        precision = self.config.precision
        self.scale = state.loss_scale
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=state.loss_scale,
            growth_factor=precision.loss_scale_factor,
            backoff_factor=1 / precision.loss_scale_factor,
            growth_interval=precision.loss_scale_interval,
            enabled=self.roles.loss_scaling,
        )
        self.optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(torch.tensor(state.params[name]))
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @property
    def named(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by their canonical names, which know attention and MLP."""
        return {canonical(name): p for name, p in self.model.named_parameters()}

    def configure(self) -> None:
        """Sets the process's switches, which another PyTorch may have set before."""
        float32 = "tf32" if self.roles.tf32 else "ieee"
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.fp32_precision = float32
        torch.backends.cudnn.fp32_precision = float32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True

    def state(self) -> TrainState:
        named, moments = self.named, self.optimizer.state
        return TrainState(
            params={name: to_numpy(p) for name, p in named.items()},
            mu={name: to_numpy(moments[p]["exp_avg"]) for name, p in named.items()},
            nu={name: to_numpy(moments[p]["exp_avg_sq"]) for name, p in named.items()},
            step=self.taken,
            updates=self.updates,
            loss_scale=self.scale,
            good_steps=self.scaler.state_dict().get("_growth_tracker", 0),
        )

    def prepare(self) -> None:
        """Compiles by running once; torch.compile cannot do otherwise."""
        if self.config.execution.compile:
            shape = (self.config.optim.batch_size, self.config.model.context + 1)
            batch = torch.zeros(shape, dtype=torch.int64, device=self.device)
            try:
                train_torch.mean_loss(self.minimal, self.called, batch).backward()
            except torch._dynamo.exc.BackendCompilerFailed as error:
                reason = str(error).partition("\n")[0]
                remedy = "install what it misses or drop --compile"
                raise UserError(f"--compile: torch.compile failed ({reason}); {remedy}") from None
            self.optimizer.zero_grad(set_to_none=True)

    def place(self, window: Batch) -> Tensor:
        tokens = torch.from_numpy(join_tokens(window)).long()
        pinned = tokens.pin_memory() if self.device.type == "cuda" else tokens
        return pinned.to(self.device, non_blocking=True)

    def step(self, window: Tensor) -> Callable[[], StepResult]:
        scale, rate = self.scale, float(self.rates[self.updates])
        metrics = train_torch.train_step(
            self.minimal, self.called, self.optimizer, self.scaler, window, rate
        )
        # Under fp16 alone this waits: the next step's rate hangs on whether this one was skipped.
        self.scale = self.scaler.get_scale()
        skipped = self.scale < scale
        self.taken, self.updates = self.taken + 1, self.updates + (not skipped)
        host = metrics.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if metrics.is_cuda else None
        if copied:
            copied.record()

        def wait() -> StepResult:
            if copied:
                copied.synchronize()
            loss, norm = host.tolist()
            return StepResult(loss, norm, rate, scale, skipped)

        return wait

    def peak_bytes(self) -> int:
        on_cuda = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated() if on_cuda else resident_peak()


def find_device(asked: str) -> torch.device:
    """The device of `--device auto|cpu|cuda`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    found = torch.cuda.is_available()
    remedy = f"PyTorch {torch.__version__} sees no CUDA device; use --device cpu"
    require(found or asked != "cuda", "--device", asked, remedy)
    return torch.device("cuda", 0) if found and asked != "cpu" else torch.device("cpu")


def to_numpy(tensor: Tensor) -> Any:
    """A copy on the host."""
    return tensor.detach().cpu().clone().numpy()


def canonical(name: str) -> str:
    for room, layers in (("attn", ("qkv", "proj")), ("mlp", ("up", "down"))):
        for layer in layers:
            name = name.replace(f".{layer}.", f".{room}.{layer}.")
    return name


def build(config: Config) -> NanoGPT:
    return NanoGPT(config)
