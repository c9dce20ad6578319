"""Bugs planted in the example ports, and rewrites of them that change nothing."""

from pathlib import Path
from typing import NamedTuple

from lockstep.process import ROOT

EXAMPLES = ROOT / "examples" / "gpt"


class Mutant(NamedTuple):
    """Text changed in `gpt_torch.py`; the first root's place, and a word of its cause."""

    name: str
    old: str
    new: str
    where: str  # a part of the first root's name
    cause: str = ""  # a part of its cause; "" where the catalogue has none


TORCH = [
    # forward
    Mutant("gelu-erf", 'approximate="tanh"', 'approximate="none"', "mlp.down", "GELU (erf) for GELU (tanh)"),
    Mutant("relu", "self.gelu(self.c_fc(x))", "F.relu(self.c_fc(x))", "mlp.down", "ReLU for GELU (tanh)"),
    Mutant("silu", "self.gelu(self.c_fc(x))", "F.silu(self.c_fc(x))", "mlp.down", "SiLU for GELU (tanh)"),
    Mutant("quick-gelu", "self.gelu(self.c_fc(x))", "(lambda h: h * torch.sigmoid(1.702 * h))(self.c_fc(x))", "mlp.down", "quick GELU for GELU (tanh)"),
    Mutant("no-activation", "self.gelu(self.c_fc(x))", "self.c_fc(x)", "mlp.down", "no activation for GELU (tanh)"),
    Mutant("ln-eps", "self.ln_2 = nn.LayerNorm(D)", "self.ln_2 = nn.LayerNorm(D, eps=1e-6)", "norm2", "eps 1e-06, for eps 1e-05"),
    Mutant("ln-f-eps", "self.ln_f = nn.LayerNorm(D)", "self.ln_f = nn.LayerNorm(D, eps=1e-12)", "norm", "eps 1e-12, for eps 1e-05"),
    Mutant("ln-eps-ulp", "self.ln_1 = nn.LayerNorm(D)", "self.ln_1 = nn.LayerNorm(D, eps=1e-5 + 1e-10)", "norm1", "eps 1.00001e-05, for eps 1e-05"),
    Mutant("rms-norm", "self.ln_2(x)", "F.rms_norm(x, (D,), self.ln_2.weight, 1e-5) + self.ln_2.bias", "mlp"),
    Mutant("scale-missing", "is_causal=True", "is_causal=True, scale=1.0", "attention.out", "scale: no scale, for 1/sqrt(head size)"),
    Mutant("scale-width", "is_causal=True", "is_causal=True, scale=D ** -0.5", "attention.out", "scale: 1/sqrt(width), for 1/sqrt(head size)"),
    Mutant("not-causal", "is_causal=True", "is_causal=False", "attention.out", "mask: none, for causal"),
    Mutant("mask-off-by-one", "is_causal=True", "attn_mask=torch.tril(torch.ones(t, t, dtype=torch.bool), 1)", "attention.out", "one position too far"),
    Mutant("qk-swapped", "scaled_dot_product_attention(q, k, v", "scaled_dot_product_attention(k, q, v", "attention.out", "key, query, value"),
    Mutant("heads-interleaved", "part.view(b, t, H, D // H).transpose(1, 2) for", "part.view(b, t, D // H, H).permute(0, 3, 1, 2) for", "attention.out", "head size, heads"),
    Mutant("head-count", "V, T, D, H, L = 61, 12, 24, 3, 2", "V, T, D, H, L = 61, 12, 24, 6, 2", "attention.out", "heads: 6, for 3"),
    Mutant("no-attention-residual", "x = x + self.attn(self.ln_1(x))", "x = self.attn(self.ln_1(x))", "norm2", "for attention + x"),
    Mutant("post-norm", "x = x + self.attn(self.ln_1(x))", "x = x + self.attn(x)", "attention", "x, for norm1"),
    Mutant("residual-doubled", "return x + self.mlp(self.ln_2(x))", "return x + 2 * self.mlp(self.ln_2(x))", "blocks.*", "2 * mlp"),
    Mutant("embedding-scaled", "x = self.wte(tokens) +", "x = self.wte(tokens) * D ** 0.5 +", "blocks.*", "4.89898 * tokens"),
    Mutant("no-positions", " + self.wpe(torch.arange(tokens.shape[1]))", " + 0 * self.wpe(torch.arange(tokens.shape[1]))", "blocks.*", "tokens, for positions + tokens"),
    Mutant("positions-off-by-one", "self.wpe(torch.arange(tokens.shape[1]))", "self.wpe((torch.arange(tokens.shape[1]) + 1) % T)", "positions"),
    Mutant("no-final-norm", "self.lm_head(self.ln_f(x))", "self.lm_head(x + 0 * self.ln_f(x))", "tokens.attend", "blocks.1, for norm"),
    Mutant("logits-scaled", "return self.lm_head(self.ln_f(x))", "return self.lm_head(self.ln_f(x)) / D ** 0.5", "(root)", "tokens.attend"),
    Mutant("float32-softmax-input", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True).tanh()", "attention.out"),
    Mutant("no-out-bias", "self.c_proj = nn.Linear(4 * D, D)", "self.c_proj = nn.Linear(4 * D, D, bias=False)", "mlp.down.bias", "reference alone"),
    Mutant("untied-head", "        self.lm_head.weight = self.wte.weight\n", "", "lm_head.weight", "port alone"),
    # loss
    Mutant("sum-for-mean", "batch[:, 1:].flatten())", 'batch[:, 1:].flatten(), reduction="sum")', "loss", "sum of the cross-entropy"),
    Mutant("targets-not-shifted", "return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())", "return F.cross_entropy(logits.flatten(0, 1), batch[:, :-1].flatten())", "loss", "the token itself"),
    Mutant("label-smoothing", "batch[:, 1:].flatten())", "batch[:, 1:].flatten(), label_smoothing=0.1)", "loss", "smoothed by 0.1"),
    # backward
    Mutant("attention-detached", "x = x + self.attn(self.ln_1(x))", "x = x + self.attn(self.ln_1(x)).detach()", "attention", "no gradient"),
    Mutant("embedding-detached", "x = self.wte(tokens) +", "x = self.wte(tokens).detach() +", "tokens", "no gradient"),
    Mutant("gradient-halved", "return self.lm_head(self.ln_f(x))", "y = self.ln_f(x)\n        return self.lm_head(y / 2 + (y / 2).detach())", "norm", "0.5 times the reference's gradient"),
    Mutant("head-detached", "return self.lm_head(self.ln_f(x))", "return F.linear(self.ln_f(x), self.wte.weight.detach())", "tokens"),
    # optimizer
    Mutant("adam-eps", "lr=1e-3, betas=(0.9, 0.95))", "lr=1e-3, betas=(0.9, 0.95), eps=1e-6)", "optimizer", "eps 1e-06, for 1e-08"),
    Mutant("beta2", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)", "optimizer", "beta2 0.999, for 0.95"),
    Mutant("learning-rate", "lr=1e-3", "lr=3e-3", "optimizer", "learning rate 0.003"),
    Mutant("decay-everything", '"params": others, "weight_decay": 0.0', '"params": others, "weight_decay": 0.1', "optimizer", "weight decay 0.1, for 0"),
    Mutant("no-decay", '"weight_decay": 0.1', '"weight_decay": 0.0', "optimizer", "weight decay 0, for 0.1"),
    Mutant("l2-for-decoupled", "torch.optim.AdamW(groups", "torch.optim.Adam(groups", "optimizer", "L2 in the gradient 0.1"),
    Mutant("sgd", "torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))", "torch.optim.SGD(groups, lr=1e-3, momentum=0.9)", "optimizer", "rule SGD, for Adam"),
    Mutant("no-clip", "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", "", "optimizer", "clip none, for norm 1"),
    Mutant("clip-larger", "model.parameters(), 1.0)", "model.parameters(), 2.0)", "optimizer", "clip norm 2, for norm 1"),
    Mutant("clip-value", "clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_value_(model.parameters(), 0.5)", "optimizer", "clip value 0.5"),
    Mutant("warm-up", "    opt.step()", "    for g in opt.param_groups:\n        g['lr'] = 1e-3 * min(1, (step + 1) / 10)\n    opt.step()", "optimizer", "learning rate 0.0001 in step 0"),
    # initial values
    Mutant("init-scale", "nn.init.normal_(p, std=0.02 / (2 * L) ** 0.5 if residual else 0.02)", "nn.init.normal_(p, std=0.02)", "down.kernel", "normal(0.02)"),
    Mutant("init-default", "            if p.dim() == 2:", "            if p.dim() == 2 and 'c_fc' not in name:", "up.kernel"),
    Mutant("init-bias", "nn.init.zeros_(p)", "nn.init.normal_(p, std=0.02)", "bias"),
]  # fmt: skip

REWRITES = [
    Mutant("attention-written-out", "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)", "s = (q @ k.transpose(-1, -2)) / (D // H) ** 0.5\n        s = s.masked_fill(~torch.tril(torch.ones(t, t, dtype=torch.bool)), float('-inf'))\n        y = s.softmax(-1) @ v", ""),
    Mutant("rows", "return self.c_proj(self.gelu(self.c_fc(x)))", "return self.c_proj(self.gelu(self.c_fc(x.flatten(0, 1)))).view_as(x)", ""),
    Mutant("renamed", "c_attn", "combined_projection", ""),
    Mutant("renamed-blocks", "self.h", "self.layers", ""),
    Mutant("renamed-norms", "ln_", "norm_", ""),
    Mutant("head-by-linear", "return self.lm_head(self.ln_f(x))", "return F.linear(self.ln_f(x), self.wte.weight)", ""),
    Mutant("loss-by-hand", "return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())", "log = logits.log_softmax(-1)\n    return -log.gather(-1, batch[:, 1:, None]).mean()", ""),
    Mutant("gelu-function", "self.gelu(self.c_fc(x))", 'F.gelu(self.c_fc(x), approximate="tanh")', ""),
    Mutant("order-of-sums", "return x + self.mlp(self.ln_2(x))", "return self.mlp(self.ln_2(x)) + x", ""),
    Mutant("norm-by-hand", "return self.lm_head(self.ln_f(x))", "y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)\n        return self.lm_head(y * self.ln_f.weight + self.ln_f.bias)", ""),
    Mutant("dropout", "return self.c_proj(self.gelu(self.c_fc(x)))", "return F.dropout(self.c_proj(self.gelu(self.c_fc(x))), 0.1)", ""),
    Mutant("split-qkv", "self.c_attn = nn.Linear(D, 3 * D)", "self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))", ""),
]  # fmt: skip


def changed(mutant: Mutant, folder: Path, source: str = "gpt_torch.py") -> Path:
    """A copy of the example with the mutant's change, which must be one."""
    text = (EXAMPLES / source).read_text()
    assert mutant.old in text, f"{mutant.name}: nothing to change"
    text = text.replace(mutant.old, mutant.new)
    if mutant.name == "split-qkv":
        text = text.replace("self.c_attn(x).split(D, dim=2)",
                            "(self.query(x), self.key(x), self.value(x))")  # fmt: skip
    path = folder / f"{mutant.name.replace('-', '_')}.py"
    path.write_text(text)
    return path
