"""spanlab: a laboratory for KV-cache reuse in LLM serving."""
