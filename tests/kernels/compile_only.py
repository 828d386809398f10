"""Compile for another device, in a separate process: python compile_only.py CAPABILITY CALLS.

CALLS are Python statements that call launchers on CPU tensors. Each launch is specialised and compiled to a cubin as
on the device, but not run. Prints a JSON list of [kernel, bytes of shared memory], one for each launch.
"""

from __future__ import annotations

import json
import sys

from spanlab_kernels.ahead import compiled_for

if __name__ == "__main__":
    with compiled_for(int(sys.argv[1])) as launches:
        exec(sys.argv[2], {})
    assert all(compiled.kernel.asm["cubin"] for compiled in launches)
    print(json.dumps([(compiled.name, compiled.shared) for compiled in launches]))
