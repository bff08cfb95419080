"""Models: one file per family, each turning a Hugging Face config into a `CausalLM` that reads a `Batch`.

Invariant: nothing here is inferred from a name or a size; a config key that changes mathematics is read or refused.
"""

from truegate.models.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
