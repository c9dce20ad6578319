"""The claims."""

from benchmarks.claims import judges
from benchmarks.claims.claim import Claim

LITERATURE, TUTORIALS, ADVICE = "literature", "tutorials", "advice in circulation"

CLAIMS = [
    Claim(what="matrix products are 2 to 8 times faster in half precision", source=LITERATURE,
          judge=judges.faster_matmuls),
    Claim(what="the same on an A100 or H100", source=TUTORIALS, needs="an A100 or H100"),
    Claim(what="a T4 does 65 TFLOP/s in fp16 and 8 in fp32", source=TUTORIALS, needs="a T4"),
    Claim(what="mixed precision trains 1.3 to 2 times as fast (30-50 %, 1.5-2x)",
          source=TUTORIALS, judge=judges.faster_training),
    Claim(what="mixed precision halves the memory", source=TUTORIALS,
          judge=judges.half_the_memory),
    Claim(what="ResNet-50, batch 64: AMP needs 42 % less memory", source=TUTORIALS,
          needs="an RTX 3090, and a ResNet, which Lockstep has not"),
    Claim(what="AMP is slower on very small models", source=LITERATURE,
          judge=judges.slow_when_small),
    Claim(what="validation metrics stay within 0.1 %", source=LITERATURE,
          judge=judges.same_validation),
    Claim(what="fp32 training costs 16 bytes a parameter, activations aside", source=TUTORIALS,
          judge=judges.bytes_a_parameter("fp32", 16)),
    Claim(what="bf16 mixed training costs 12 bytes a parameter (125M in 1.5 GB)",
          source=TUTORIALS, judge=judges.bytes_a_parameter("bf16", 12)),
    Claim(what="bf16 mixed training costs 12 + 2 = 14 bytes a parameter", source=TUTORIALS,
          judge=judges.bytes_a_parameter("bf16", 14)),
    Claim(what="with float32 master weights and gradients it costs 16, as fp32 does",
          source="arithmetic", judge=judges.bytes_a_parameter("bf16", 16)),
    Claim(what="remat takes 1.3 times the time, for 1/sqrt(L) of the memory",
          source="Chen 2016 (arXiv:1604.06174)", judge=judges.sublinear_remat),
    Claim(what="accumulation keeps memory flat", source=LITERATURE,
          judge=judges.flat_accumulation),
    Claim(what="a healthy loss scale stays at 1,024 or above", source=TUTORIALS,
          judge=judges.healthy_scale),
    Claim(what="on overflow, raise the initial scale", source=ADVICE,
          judge=judges.raised_scale),
    Claim(what="the parameters' dtype tells the optimizer state's", source=ADVICE,
          judge=judges.moments_like_parameters),
]  # fmt: skip
