"""spanlab: a laboratory for KV-cache reuse in LLM serving."""

from spanlab.compiled import use_build

use_build()  # before any module that may be compiled is imported
