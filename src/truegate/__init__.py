"""Truegate: every token reaches the experts its gate chose, at the weight its gate gave."""

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """`LLM` needs torch, which the base install leaves out: loaded on first use."""
    if name == "SamplingParams":
        from truegate.types import SamplingParams

        return SamplingParams
    if name in ("LLM", "RequestOutput"):
        try:
            import torch  # noqa: F401
        except ImportError:
            from truegate.errors import UserError

            raise UserError(f"truegate.{name} needs the engine: pip install 'truegate[serve]'") from None
        from truegate import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'truegate' has no attribute {name!r}")
