"""FlashInfer's TensorRT-LLM experts take raw logits and route inside the kernel, the routed scale included."""

from truegate.law.contract import Experts, SharedLayout, ZeroWeight
from truegate.law.plan import Plan
from truegate.moe.need import cannot_run

CONTRACT = Experts(
    name="flashinfer_trtllm",
    status="interface",
    source="engines: takes raw logits; kinds and limits as the public kernels document them",
    id_dtype="int32",
    accepts=(ZeroWeight(),),
    takes_logits=True,
    folds=frozenset({"biased_grouped_sigmoid", "softmax"}),
    weighs="always",
    shared_layouts=frozenset({SharedLayout.NONE}),
    formats=frozenset({"bf16", "fp8_block", "nvfp4"}),
    max_top_k=8,
    alignment=128,
    why_not="needs the flashinfer package and a Blackwell NVIDIA GPU; use --experts torch",
)


def build(plan: Plan, weights):
    """Refused: our reading of the interface is compiled and tested; there is no binding to the package yet."""
    raise cannot_run(CONTRACT)
