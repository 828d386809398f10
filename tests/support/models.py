"""A toy model whose sizes can be counted by hand."""

from spanlab.model_spec import ModelSpec


def make_model(**changes) -> ModelSpec:
    """One layer of attention with 144 parameters; `changes` are fields that differ."""
    sizes = {"attention_layers": 1, "hidden_size": 4, "intermediate_size": 8, "vocab_size": 10}
    return ModelSpec(**({"name": "toy", "attention_heads": 2, "kv_heads": 1, "head_dim": 2} | sizes | changes))
