"""Names of the compared systems, precisions and requests."""

ITEMSIZE = {"float32": 4, "bfloat16": 2}
#: Orders of a prompt's documents by kind of request; shuffled: none keeps its place.
ORDERS = {"cold": (0, 1, 2, 3), "same": (0, 1, 2, 3), "shuffled": (2, 0, 3, 1)}
SERVERS = ("vllm", "mistralrs", "llama_cpp", "llama_cpp_reuse")
ARMS = ("none", "radix", "pic", "cached_order")
PEERS = (*SERVERS, "kvboost", "transformers")
SYSTEMS = (*PEERS, *ARMS)
NO_CACHE = ("transformers", "none")  # their second and third requests would be as cold as the first
#: mistral.rs chooses float32 on a CPU, and what llama_server.py writes of bfloat16 weights is float32.
ONLY_FLOAT32 = ("mistralrs", "llama_cpp", "llama_cpp_reuse")
TITLES = {
    "vllm": "vLLM",
    "mistralrs": "mistral.rs",
    "llama_cpp": "llama.cpp",
    "llama_cpp_reuse": "llama.cpp `--cache-reuse 32`",
    "kvboost": "kvboost",
    "transformers": "transformers",
    **{name: f"ours, `{name}`" for name in ARMS},
}


def kinds_of(name: str) -> tuple[str, ...]:
    """Return the kinds of requests that a system serves: without a cache, only the first differs from none."""
    return tuple(ORDERS)[:1] if name in NO_CACHE else tuple(ORDERS)
