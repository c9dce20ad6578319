"""A torch program: hooks record each module's input, output and cotangent, or force the output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from lockstep_recorder import tree
from lockstep_recorder.calls import MOST, CallLog, slot
from lockstep_recorder.held import Held, digests
from lockstep_recorder.memory import SMALL
from lockstep_recorder.noise import largest_gaps, narrowest_of
from lockstep_recorder.side import Arrays, Look, ProgramSide
from lockstep_recorder.torch_modes import (
    Autocast,
    Formats,
    MovedSums,
    Narrowing,
    NothingNarrower,
    Watched,
    backward_in_modes,
    default_format,
    exact_functions,
    floats,
    is_float,
    is_of_transform,
    is_rounded,
    replace_floats,
    without_clip_epsilon,
    without_dropout,
    without_functional_dropout,
    without_recomputation,
)
from lockstep_recorder.user import Mistake, User, mistake
from lockstep_recorder.written import Written

UNSCALED = ("update gets gradients that are not scaled: make the GradScaler a global variable, so "
            "that it can be switched off, or leave it out")  # fmt: skip
WATCHED = 12  # first steps of a run with losses in which it is seen what `update` keeps
INSIDE, SCRIPTED = "values inside torch.vmap and torch.func", "modules inside torch.jit.script"
NARROW_INTEGERS = {"int8", "uint8", "int16", "uint16", "int32", "uint32"}
SAME = {"float64": 1e-10, "float32": 1e-4}  # relative: a run with hooks and one without


class TorchSide(ProgramSide):
    framework = "torch"

    def __init__(self, user: User, model: Any, device: str = "cpu", own: bool = False) -> None:
        super().__init__(user, own)
        self.device = find_device(device)
        self.take(user, model)
        if sum(p.numel() for p in self.model.parameters()) < SMALL:
            torch.set_num_threads(1)  # they wait for each other longer than they work
        self.note_weights({str(p.dtype).partition(".")[2] for p in self.model.parameters()})
        self.dropping: dict[str, float] | None = None  # gets the lines that drop out, and rates
        self.ungraded: set[str] | None = None  # parameters that no run gave a gradient, not zero
        self.optimizer: Any = None
        self.pending: dict[str, torch.Tensor] = {}  # gradients that no step has used yet
        self.moved: set[str] = set()  # variables that `loss` changes
        self.measured: list[Any] = []  # (name, tensor, gradient, weights) of the optimizer alone
        self.as_given = False  # whole numbers of a batch keep their formats
        self.asks_all = True  # what arrives is recorded, too, where the program wants no gradient

    def take(self, user: User, built: Any) -> None:
        for name, p in built.named_parameters():
            if isinstance(p, torch.nn.parameter.UninitializedParameter):
                raise Mistake(f"{user.name}: build leaves {name} without a shape; run the model "
                              "once in build")  # fmt: skip
        self.user, self.model = user, built.to(self.device)
        self.written.drops = without_dropout(self.model)
        self.names = {id(m): name or "(root)" for name, m in self.model.named_modules()}
        self.variables = Held(self.user.module, self.model)
        self.counts = {n: x.clone() for n, x in self.model.named_buffers() if not is_float(x)}

    def put(self, values: Arrays) -> None:
        self.model._apply(widest)
        self.load(values)

    @contextlib.contextmanager
    def make_wide(self) -> Iterator[None]:
        with NothingNarrower(), default_format(torch.float64):
            yield

    def again(self) -> ProgramSide:
        made = TorchSide(self.user, self.user.call("build", 0), self.device)
        made.asks_all = self.asks_all
        return made

    def note_weights(self, formats: set[str]) -> None:
        """Keeps the narrowest format that weights have, or were to have."""
        self.weights_format = narrowest_of(formats | {self.weights_format})

    def facts(self) -> dict[str, Any]:
        modules = {self.names[id(m)]: type(m).__name__ for m in self.model.modules()}
        aliases: dict[int, list[str]] = {}
        for name, p in self.model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(p), []).append(name)
        return self.about(
            versions={"torch": torch.__version__, "numpy": np.__version__}, device=self.device,
            modules=modules,
            parameters=[n for n, p in self.model.named_parameters() if is_float(p)],
            tied=[each for each in aliases.values() if len(each) > 1],
        )  # fmt: skip

    def initial(self) -> Arrays:
        return self._tensors(self.model)

    def build(self, seed: int) -> Arrays:
        return self._tensors(self.user.call("build", seed))

    def _tensors(self, model: Any) -> Arrays:
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        return {n: self.held(x) for n, x in named.items() if is_float(x)}

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        with torch.no_grad():
            for name, x in weights.items():
                named[name].copy_(like(named[name], x))
            for name, x in ({} if self.keeps else self.counts).items():
                named[name].copy_(x)
        self.model.zero_grad(set_to_none=True)

    def widen(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """float64 where the program runs in it, else as it is written; then the hooks are tried."""
        self.choose_precision(weights, spec, batch)
        if not self.forward:
            self._try_hooks(weights, spec, batch)

    def choose_precision(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        former, self.chosen = self.chosen, True
        if self.own:
            self.load(weights)
            with Formats() as mode:
                self._loss(spec, batch)
            self.narrow = self.told_refusal() + sorted(mode.found)
            self.narrowest = narrowest_of(mode.found)
            return
        if former:
            return
        drops, self.dropping = self.written.drops, {}
        self.written = Written(self.weights_format)
        self.choose(weights, spec, batch)
        self._note_wraps(weights, spec, batch)
        self.narrowest = self.precision
        self.written.drops = drops | dict(sorted(self.dropping.items()))
        self.written.drops_always = self._drops_always(spec, batch) if self.dropping else []
        self.dropping = None

    def look(self, weights: Arrays, spec: Any, batch: Arrays) -> Look:
        self.model._apply(widest)
        written = None if self.wide else self.written
        try:
            self.load(weights)
            with Autocast(self.device) as autocast, Narrowing(written, autocast) as mode:
                self._loss(spec, batch)
        except Mistake as error:
            if not error.raised:
                raise
            return Look([], [], error)
        held = [f"float32 of {name}" for name, _ in self._constants()]
        return Look(mode.found, mode.rounded + held)

    def figures(self, weights: Arrays, spec: Any, batch: Arrays) -> tuple[float, Arrays]:
        return self._run_plain(weights, spec, batch)

    def refuse(self, raised: Mistake) -> None:
        self.model.float()
        self.refused, self.precision = raised.raised, "float32"
        self.narrow = self.told_refusal()

    def _note_wraps(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """Notes narrow whole numbers of a batch with which the loss is another than with int64."""
        formats = {f for f in tree.formats_of(spec) if f in NARROW_INTEGERS}
        if not formats:
            return
        losses = []
        for self.as_given in (False, True):
            self.load(weights)
            with contextlib.suppress(Mistake):  # such as of an index in uint8
                losses.append(self._loss(spec, batch).item())
        self.as_given = False
        if len(losses) == 2 and not abs(losses[1] - losses[0]) <= SAME["float32"] * abs(losses[0]):
            self.wraps |= {f"{name} of the batch" for name in formats}

    def _drops_always(self, spec: Any, batch: Arrays) -> list[str]:
        """Runs the program in evaluation; returns the lines that drop out then, too."""
        self.dropping = {}
        with self._evaluating(), contextlib.suppress(Mistake):
            self._loss(spec, batch)
        return sorted(self.dropping)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def evaluated(
        self, weights: Arrays, spec: Any, batch: Arrays
    ) -> tuple[dict[str, Any], Arrays]:  # fmt: skip
        with self._evaluating(), contextlib.suppress(Mistake):
            return self.run(weights, spec, batch)
        return {}, {}

    def _constants(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers that were made in float32, such as a table of positions."""
        return [(name, x) for name, x in self.model.named_buffers()
                if is_float(x) and not x.is_complex() and is_rounded(x)]  # fmt: skip

    def _try_hooks(self, weights: Arrays, spec: Any, batch: Arrays) -> None:
        """Compares a run without a hook with one that is recorded.

        A tensor that wants no gradient is first made to want one, which can give gradients to
        parameters that have none without it, as those in a reentrant checkpoint.
        """
        loss, plain = self._run_plain(weights, spec, batch)
        for self.asks_all in (True, False):
            self.changed, Force.is_inside = [], False
            about, seen = self.run(weights, spec, batch)
            self.differentiates = Force.is_inside
            if not abs(about["loss"] - loss) <= SAME[self.precision] * abs(loss):
                return  # it is random, or not finite
            gaps = largest_gaps(plain, [{name: seen[f"grad/{name}"] for name in plain}])
            self.changed = [n for n, gap in gaps.items() if not gap <= SAME[self.precision]]
            if not self.changed:
                return

    def _run_plain(
        self, weights: Mapping[str, np.ndarray], spec: Any, batch: Arrays
    ) -> tuple[float, Arrays]:
        """The loss and all gradients, without a hook."""
        self.load(weights)
        loss = self._loss(spec, batch)
        if loss.requires_grad:
            self._backward(loss)
        return loss.item(), self._grads()

    def _grads(self) -> Arrays:
        if self.forward:
            return {}
        without = {n for n, p in self.model.named_parameters() if p.grad is None}
        self.ungraded = without if self.ungraded is None else self.ungraded & without
        return {
            name: tree.to_numpy(p.grad if p.grad is not None else torch.zeros_like(p))
            for name, p in self.model.named_parameters()
            if is_float(p)
        }

    def _leaf(self, x: np.ndarray) -> torch.Tensor:
        """Floats get the model's format, which numpy may not have."""
        own = next((p.real.dtype for p in self.model.parameters() if is_float(p)), None)
        if x.dtype.kind == "c":
            wide = x.dtype == np.complex128 if own is None else own == torch.float64
            x = x.astype(np.complex128 if wide else np.complex64)
        elif x.dtype.kind in "iu" and not self.as_given:
            x = x.astype(np.int64)
        made = torch.from_numpy(np.array(x)).to(self.device)
        return made.to(own) if own is not None and x.dtype.kind == "f" else made

    def _loss(self, spec: Any, batch: Arrays) -> torch.Tensor:
        given = tree.put_together(spec, batch, self._leaf)
        wide = self.make_wide() if self.wide else nullcontext()
        asks = torch.set_grad_enabled(not self.forward)
        moved = MovedSums() if self.moves_sums else nullcontext()
        exact = nullcontext() if self.own else exact_functions()
        watch = self._watch()
        dropping = without_functional_dropout(self.dropping)
        with wide, exact, dropping, asks, moved, watch:
            Force.in_loss = True
            before = {path or "batch": tree.to_numpy(x) for path, x in tree.leaves(given)}
            try:
                loss = self.user.call("loss", self.model, given)
            finally:
                Force.in_loss = False
        self.spoiled = changed_leaves(before, given)
        loss = loss[0] if isinstance(loss, tuple) else loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise Mistake(f"{self.user.name}: loss gives {describe(loss)}; return a scalar tensor")
        return loss.reshape(())

    def _watch(self) -> contextlib.AbstractContextManager[Any]:
        return Watched(self.user.conditions) if self.user.conditions.on else nullcontext()

    def run(
        self, weights: Mapping[str, np.ndarray], spec: Any, batch: Arrays,
        forced: Arrays | None = None,
    ) -> tuple[dict[str, Any], Arrays]:  # fmt: skip
        """The loss, what each module sees, and all gradients.

        Args:
            forced: `in/CALL` replaces a module's input, `act/CALL` its output, `dact/CALL` the
                cotangent of its output.
        """
        self.load(weights)
        calls = CallLog()
        with without_recomputation():
            with self._hooks(calls, forced or {}):
                loss = self._loss(spec, batch)
            if loss.requires_grad:
                self._backward(loss)
        seen, grads = dict(calls.arrays), self._grads()
        for name, x in self.model.named_buffers():
            if is_float(x):
                seen[f"state/{name}"] = tree.to_numpy(x)
        seen |= {f"state/{name}": x for name, x in self._moved(weights)}
        if self.changed and not forced:
            grads = self._run_plain(weights, spec, batch)[1]
        seen.update({f"grad/{name}": x for name, x in grads.items()})
        if self.user.has("outputs") and not forced:
            seen |= self._outputs(spec, batch)
        about = {"loss": loss.item(), "events": calls.events, "kinds": calls.kinds,
                 "paths": calls.paths}  # fmt: skip
        return about, seen

    def _outputs(self, spec: Any, batch: Arrays) -> Arrays:
        """Returns `given/PATH`, what the program's function `outputs` gives."""
        given = tree.put_together(spec, batch, self._leaf)
        wide = NothingNarrower() if self.wide else nullcontext()
        with wide, without_functional_dropout(), torch.no_grad():
            made = self.user.call("outputs", self.model, given)
        return {f"given/{path or '0'}": tree.to_numpy(x) for path, x in tree.leaves(made)}

    def counted(self) -> Arrays:
        return {n: tree.to_numpy(x).astype(float) - tree.to_numpy(self.counts[n])
                for n, x in self.model.named_buffers() if n in self.counts}  # fmt: skip

    def buffers(self) -> Arrays:
        return {n: tree.to_numpy(x) for n, x in self.model.named_buffers() if is_float(x)}

    def kept_values(self, also: Sequence[str] = ()) -> Arrays:
        names = {*self.kept, *also}
        return {name: np.asarray(tree.to_numpy(x), float)
                for name, x in self.variables.values().items()
                if name.partition("/")[0] in names}  # fmt: skip

    def restore(self) -> None:
        self.variables.restore()

    def marks(self) -> dict[str, int]:
        return digests(self.variables.values())

    def _moved(self, weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the parameters that the forward pass has changed, such as those of a teacher."""
        for name, p in self.model.named_parameters():
            known = is_float(p) and name in weights and not self.forward
            if known and not torch.equal(p.detach(), like(p, weights[name])):
                yield name, tree.to_numpy(p)

    def _backward(self, loss: torch.Tensor) -> None:
        try:
            if self.user.conditions.on:
                with self._watch():
                    backward_in_modes(loss)
            else:
                loss.backward()
        except RuntimeError as error:
            raise mistake(self.user.name, "loss, backward", error) from error

    @contextlib.contextmanager
    def _hooks(self, calls: CallLog, forced: Arrays) -> Iterator[None]:
        def before(module: Any, args: Any, kwargs: Any) -> Any:
            if any(map(is_of_transform, floats((args, kwargs)))):
                calls.open.append("")
                self.unseen = sorted({*self.unseen, INSIDE})
                return None
            call = calls.begin(self.names[id(module)], type(module).__name__)

            def look(at: int, x: torch.Tensor) -> Any:
                if at >= MOST:
                    return x
                key = f"in/{slot(call, at)}"
                calls.arrays[key] = tree.to_numpy(x)
                if key not in forced:
                    return x
                return Force.apply(x, like(x, forced[key]), None, ignore)

            return replace_floats((args, kwargs), look)

        def after(module: Any, args: Any, y: Any) -> Any:
            call = calls.end()
            if call and any(map(is_of_transform, floats(y))):
                calls.drop(call)  # which was given nothing of the transform's
                self.unseen = sorted({*self.unseen, INSIDE})
            if call not in calls.kinds:
                return y
            if not calls.open:
                self._ship(call, y, calls)

            def look(at: int, x: torch.Tensor) -> Any:
                if at >= MOST or is_differentiated(x):
                    return x
                asks = self.asks_all and torch.is_grad_enabled()
                if asks and not (at or x.requires_grad):
                    x = x.detach().requires_grad_().clone()  # what arrives is wanted, as in JAX
                return self._point(x, slot(call, at), calls, forced)

            return replace_floats(y, look)

        handles = []
        for module in self.model.modules():
            try:
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after))
            except RuntimeError:  # of what takes no hooks
                self.unseen = sorted({*self.unseen, SCRIPTED})
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _ship(self, call: str, y: Any, calls: CallLog) -> None:
        """Notes the places of what an outermost call gives, and records what no slot has."""
        held = {id(x): f"act/{slot(call, at)}" for at, x in enumerate(floats(y)) if at < MOST}
        for at, (path, x) in enumerate(tree.leaves(y)):
            key = held.get(id(x))
            if key is None:
                key = f"more/{slot(call, at)}"
                calls.arrays[key] = tree.to_numpy(x)
            calls.paths[key] = path

    def _point(self, y: Any, name: str, calls: CallLog, forced: Arrays) -> Any:
        calls.arrays[f"act/{name}"] = tree.to_numpy(y)
        if y.requires_grad:  # zero where the backward pass never comes
            calls.arrays[f"dact/{name}"] = np.zeros_like(calls.arrays[f"act/{name}"])

        def keep(g: torch.Tensor) -> None:
            calls.arrays[f"dact/{name}"] = tree.to_numpy(g)

        if f"act/{name}" in forced:
            given = [forced.get(f"{kind}/{name}") for kind in ("act", "dact")]
            value, cotangent = (None if x is None else like(y, x) for x in given)
            return Force.apply(y, value, cotangent, keep)
        # Another tensor than a child's output; its hook would go with what is done in place.
        return Force.apply(y, y.detach(), None, keep)

    def begin(self, weights: Mapping[str, np.ndarray]) -> None:
        """A fresh optimizer, on given weights."""
        self.restore()
        self.load(weights)
        with self._default_format():
            self.optimizer, self.pending = self.user.call("optimizer", self.model), {}
        self.variables.optimizer = self.optimizer
        self._switch_scalers_off()
        listen = getattr(self.optimizer, "register_step_post_hook", None)
        self.always_steps = listen is None
        if listen:
            listen(self._note_step)

    def _switch_scalers_off(self) -> None:
        """Gradients are given as they are, not scaled."""
        kind = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
        for value in vars(self.user.module).values():
            if isinstance(value, kind):
                value._enabled, self.scales = False, True

    def _note_step(self, *_: Any) -> None:
        self.stepped = True

    def update(self, weights: Arrays, grads: Arrays, step: int) -> Arrays:
        """One optimizer step from given weights and gradients; the weights after it."""
        self.load(weights)
        for name, p in self.model.named_parameters():
            if name in grads and self._gets(name, p, grads[name]):
                p.grad = like(p, grads[name]).clone()
                if name in self.pending:
                    p.grad += self.pending[name]
        self._step(step)
        return self.initial()

    def _gets(self, name: str, p: torch.nn.Parameter, gradient: np.ndarray) -> bool:
        """Says if a parameter is given a gradient: one that never has any keeps None, for which
        torch's optimizers leave it alone, where zeros would let it decay."""
        never = name in (self.ungraded or ()) and not gradient.any()
        return p.requires_grad and not never

    def begin_alone(self, weights: Arrays, grads: Arrays) -> Callable[[int, float], Sequence[Any]]:
        """A fresh optimizer: each step gets the same weights, and gradients times a factor.

        Returns:
            What one step moves each tensor by, see `recording.alone`, in the order of `grads`; it
            is given the step and the factor.
        """
        self.begin(weights)
        named = dict(self.model.named_parameters())
        tensors = [named[name] for name in grads]
        before = [p.detach().clone() for p in tensors]
        given = [like(p, grads[name]) for name, p in zip(grads, tensors)]
        self.asked = {name: [] for name in grads}
        self.measured = [*zip(grads, tensors, given, before)]

        def take_step(step: int, factor: float) -> Sequence[Any]:
            for name, p, start, g in zip(grads, tensors, before, given):
                p.data.copy_(start)
                self.asked[name].append(p.requires_grad)
                if self._gets(name, p, grads[name]):
                    p.grad = factor * g + self.pending.get(name, 0)
            self._step(step)
            with torch.no_grad():
                moved = torch._foreach_sub(tensors, before)
                norms = torch._foreach_norm(moved)
                return [(float(n), inner(g, m), inner(w, m))
                        for n, g, w, m in zip(norms, given, before, moved)]  # fmt: skip

        return take_step

    def optimizer_slots(self) -> Arrays:
        kind, state = type(self.optimizer), getattr(self.optimizer, "state", {})
        found = {}
        for name, p, g, w in self.measured:
            for key, x in (state.get(p) or {}).items():
                if isinstance(x, (int, float, torch.Tensor)) and not isinstance(x, bool):
                    place = f"{kind.__module__}.{kind.__name__}.{key}/{name}"
                    found[place] = _measured(torch.as_tensor(x), g, w)
        return found

    def _step(self, step: int) -> None:
        """Gradients stay until `opt.step` is called: a user's `update` may accumulate them."""
        self.stepped = self.always_steps
        with without_clip_epsilon() if self.mends_clip else nullcontext(), self._watch():
            self._move(step)
        self.pending = {} if self.stepped else {
            name: p.grad for name, p in self.model.named_parameters() if p.grad is not None
        }  # fmt: skip

    def _move(self, step: int) -> None:
        if self.user.has("update"):
            before = self.marks() if step < WATCHED else {}
            try:
                with self._default_format():
                    self.user.call("update", self.model, self.optimizer, step)
            except Mistake as error:
                if "scale is None" not in str(error):
                    raise
                raise Mistake(f"{error}; {UNSCALED}", error.frames) from None
            if step < WATCHED:
                self.note_kept(before)
        else:
            with self._default_format():
                self.optimizer.step()

    def _default_format(self) -> contextlib.AbstractContextManager[None]:
        """Where the program runs in float64, so does what its optimizer makes without a format of
        its own, such as torch's NAdam the product of its momenta."""
        return default_format(torch.float64) if self.precision == "float64" else nullcontext()

    def train(self, weights: Mapping[str, np.ndarray], batches: list[Any]) -> list[float]:
        """The losses of a run from given weights."""
        self.begin(weights)
        before, losses = self.marks(), []
        for step, (spec, batch) in enumerate(batches):
            if not self.pending:
                self.model.zero_grad(set_to_none=True)
            loss = self._loss(spec, batch)
            self._backward(loss)
            losses.append(loss.item())
            self._step(step)
        self.note_kept(before)
        return losses


class Force(torch.autograd.Function):
    """Forward the given value, backward the given cotangent; what arrives is kept.

    A program that differentiates inside its loss gets its own gradient there.
    """

    in_loss = False  # the program computes it
    is_inside = False  # it has asked for a gradient there

    @staticmethod
    def forward(ctx: Any, y: Any, value: Any, cotangent: Any, keep: Callable[[Any], None]) -> Any:
        ctx.cotangent, ctx.keep = cotangent, keep
        return value.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if Force.in_loss:
            Force.is_inside = True
            return g, None, None, None
        ctx.keep(g)
        return (g if ctx.cotangent is None else ctx.cotangent), None, None, None


def changed_leaves(before: Arrays, nest: Any) -> Arrays:
    """Returns what leaves of a nest are now, if that is another value than before; a leaf that was
    taken out is empty."""
    after = {path or "batch": tree.to_numpy(x) for path, x in tree.leaves(nest)}
    found = {path: after.get(path, np.zeros(0)) for path in before}
    return {path: x for path, x in found.items()
            if not np.array_equal(x, before[path], equal_nan=x.dtype.kind == "f")}  # fmt: skip


def find_device(asked: str) -> str:
    """AMD's devices are "cuda" too."""
    name = "cuda" if asked == "rocm" else asked
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):  # as torch has it
        text = f"--device {asked}: PyTorch {torch.__version__} sees no such device"
        raise Mistake(text) from None
    return name


def like(x: torch.Tensor, values: np.ndarray) -> torch.Tensor:
    """Values, of which a complex tensor's are pairs, in a tensor's format and shape."""
    given = tree.to_complex(values) if x.is_complex() else np.asarray(values)
    return torch.from_numpy(given).to(x).reshape(x.shape)


def _measured(x: torch.Tensor, gradient: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
    """Measures a value that an optimizer keeps for a tensor; see `side.optimizer_slots`."""
    x = widest(x.detach()) if is_float(x) else x.detach().double()
    if x.shape == gradient.shape and is_float(gradient) and x.numel() > 1:
        x = x.to(gradient.dtype)
        return np.array([float(x.norm()), inner(gradient, x), inner(weights, x)])
    return np.array([float(x) if x.numel() == 1 and not x.is_complex() else float(x.norm())])


def inner(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the real part of the inner product of two tensors of one shape."""
    return float(torch.vdot(a.reshape(-1), b.reshape(-1)).real)


def is_differentiated(x: torch.Tensor) -> bool:
    """Says if a module makes a tensor for others to differentiate by, such as its coordinates."""
    return x.is_leaf and x.requires_grad and not isinstance(x, torch.nn.Parameter)


def widest(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.complex128) if x.is_complex() else x.double() if is_float(x) else x


def ignore(g: torch.Tensor) -> None:
    """Nobody asks what arrives at an input."""


def describe(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
