"""Compile for other devices, in a separate process: python compile_only.py [CAPABILITY CALLS]...

CALLS are Python statements that call launchers on CPU tensors. Each launch is specialised and compiled to a cubin as
on the device, but not run. Prints one JSON list of [kernel, bytes of shared memory] per capability, one item a launch.
"""

import json
import multiprocessing
import sys

from spanlab_kernels.testing import compiled_for


def compile_calls(capability: str, calls: str) -> list[tuple[str, int]]:
    """Compile in this process, whose device stays set."""
    with compiled_for(int(capability)) as launches:
        exec(calls, {})
    assert all(compiled.kernel.asm["cubin"] for compiled in launches)
    return [(compiled.name, compiled.shared) for compiled in launches]


if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        programs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
        print(json.dumps(pool.starmap(compile_calls, programs, chunksize=1)))
