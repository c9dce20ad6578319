"""`nanogpt_style` as a `Runner`: the same weights, batches and rates, the same report."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.nanogpt_style import GPT, adamw, train_step
from benchmarks.peers.refusals import refuse, require_start
from lockstep.config import Config
from lockstep.data.batch import Batch, join_tokens
from lockstep.errors import UserError, require
from lockstep.model.params import decays
from lockstep.model.state import TrainState
from lockstep.train.memory import resident_peak
from lockstep.train.schedule import learning_rates
from lockstep.twin import StepResult


class NanoGPT:
    """`lockstep.twin.Runner`: eager PyTorch in nanoGPT's idiom."""

    framework = "nanogpt"

    def __init__(self, config: Config) -> None:
        self.config, self.roles = config, config.precision.roles
        self.device = find_device(config.run.device)
        self.synchronous = self.device.type == "cpu"
        tf32 = [] if self.synchronous else ["tf32"]
        refuse(config, self.framework, ["fp64", "fp32", *tf32, "bf16", "fp16"])
        precision, optim, shape = config.precision, config.optim, config.model
        why = f"{self.framework} leaves attention to SDPA"
        require(not precision.strict, "--numerics", "strict", f"{why}; use fast")
        reference = precision.attention == "reference"
        require(not reference, "--attention", "reference", f"{why}; use auto")
        with self.device:
            model = GPT(
                vocab=shape.vocab,
                context=shape.context,
                layers=shape.n_layer,
                heads=shape.n_head,
                width=shape.d_model,
            )
        self.model = model.to(getattr(torch, self.roles.param))
        self.parameters = list(self.model.parameters())
        self.called = torch.compile(self.model) if config.execution.compile else self.model
        betas = (optim.beta1, optim.beta2)
        self.optimizer = adamw(
            self.model,
            partial(decays, patterns=optim.decay),
            betas=betas,
            weight_decay=optim.weight_decay,
        )
        compute = getattr(torch, self.roles.compute)
        self.autocast = torch.autocast(self.device.type, compute, enabled=self.roles.mixed)
        self.rates = learning_rates(optim)

    def describe(self) -> dict[str, Any]:
        cuda = self.device.type == "cuda"
        return {
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "platform": self.device.type,
            "attention": "sdpa",
            "emulated": "",
            "versions": {"torch": torch.__version__},
        }

    def load(self, state: TrainState) -> None:
        require_start(state, self.framework)
        self.configure()
        precision = self.config.precision
        self.taken = self.updates = 0
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
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.tensor(state.params[name]))
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), device=self.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    def configure(self) -> None:
        """Of the process, in which another PyTorch may have been set up before."""
        float32 = "tf32" if self.roles.tf32 else "ieee"
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.fp32_precision = float32
        torch.backends.cudnn.fp32_precision = float32
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True

    def state(self) -> TrainState:
        named, moments = dict(self.model.named_parameters()), self.optimizer.state
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
        if not self.config.execution.compile:
            return
        shape = (self.config.optim.batch_size, self.config.model.context + 1)
        batch = torch.zeros(shape, dtype=torch.int64, device=self.device)
        try:
            with self.autocast:
                loss = self.called(batch[:, :-1], batch[:, 1:])
            loss.backward()
        except torch._dynamo.exc.BackendCompilerFailed as error:
            reason = str(error).partition("\n")[0]
            remedy = "install what it misses or drop --compile"
            raise UserError(f"--compile: torch.compile failed ({reason}); {remedy}") from None
        self.optimizer.zero_grad(set_to_none=True)

    def place(self, window: Batch) -> Tensor:
        tokens = torch.from_numpy(join_tokens(window)).long()
        if self.device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens.to(self.device, non_blocking=True)

    def step(self, window: Tensor) -> Callable[[], StepResult]:
        scale, rate = self.scale, float(self.rates[self.updates])
        metrics = train_step(
            self.called,
            self.parameters,
            self.optimizer,
            self.scaler,
            self.autocast,
            window,
            rate=rate,
            clip=self.config.optim.clip,
        )
        host = metrics.to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if self.device.type == "cuda" else None
        if copied:
            copied.record()
        # Under fp16 alone this waits: the next step's rate hangs on whether this one was skipped.
        self.scale = self.scaler.get_scale()
        skipped = self.scale < scale
        self.taken, self.updates = self.taken + 1, self.updates + (not skipped)

        def wait() -> StepResult:
            if copied:
                copied.synchronize()
            loss, norm = host.tolist()
            return StepResult(loss, norm, rate, scale, skipped)

        return wait

    def peak_bytes(self) -> int:
        cuda = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated() if cuda else resident_peak()


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy on the host."""
    return tensor.detach().cpu().numpy().copy()


def find_device(asked: str) -> torch.device:
    """The device of `--device auto|cpu|cuda`.

    Raises:
        UserError: cuda was asked for and there is none.
    """
    found = torch.cuda.is_available()
    remedy = f"PyTorch {torch.__version__} sees no CUDA device; use --device cpu"
    require(found or asked != "cuda", "--device", asked, remedy)
    return torch.device("cuda" if found and asked != "cpu" else "cpu")


def build(config: Config) -> NanoGPT:
    return NanoGPT(config)
