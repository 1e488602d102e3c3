"""Compiles the Triton-lowered kernels without a GPU: registers, spills and shared memory of each.

    pip install triton            # the version that your JAX was built with, or near it
    python tools/compile_kernels.py                     # every call below, for an H100 or H200
    python tools/compile_kernels.py --capability 8.0 decode   # calls whose name has "decode"

A stack of more than 0 bytes means spilled registers. A multiprocessor of capability 9.0 has 65,536
registers and 227 KiB of shared memory for its thread blocks. Nothing here is timed on a GPU; the
seconds are Triton's compilation on this machine.
"""

import argparse
import functools
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton
from jax import Array
from jax._src.pallas.triton import lowering
from triton.backends.compiler import GPUTarget

import regard
from regard import placement
from regard.placement import Device

Call = tuple[Callable[..., Any], tuple[Any, ...]]  # attend, and shapes of query, key and value


def attention(
    B: int, T: int, S: int, N: int, K: int, D: int, V: int, dtype: str = "bfloat16", **options: Any
) -> Call:
    """`attend` with one length per example."""
    query, key, value = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, D), (B, S, K, D), (B, S, K, V))
    )

    def attend(query: Array, key: Array, value: Array, lens: Array) -> Array:
        pool = functools.partial(regard.attend, valid_lens=lens, implementation="pallas")
        return pool(query, key, value, **options)

    return attend, (query, key, value, jax.ShapeDtypeStruct((B,), jnp.int32))


def paged(
    B: int, N: int, K: int, D: int, dtype: str = "bfloat16", score: regard.Score = regard.Dot()
) -> Call:
    """One query per example over 64 pages of 16 tokens, out of 10,000."""
    query, pages = (
        jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, 1, N, D), (10_000, 16, K, D))
    )

    def attend(query: Array, key: Array, value: Array, lens: Array) -> Array:
        table = jnp.arange(64 * B, dtype=jnp.int32).reshape(B, 64) % 10_000
        memory = regard.Memory.paged(regard.Memory.of(key, value, score=score), table, lens)
        return regard.attend(query, memory, implementation="pallas")

    return attend, (query, pages, pages, jax.ShapeDtypeStruct((B,), jnp.int32))


def summary_of(
    function: Callable[..., Any], B: int, T: int, N: int, D: int, dtype: str, **options: Any
) -> Call:
    """`summarize` or `attention_map` of queries and keys."""
    rows = jax.ShapeDtypeStruct((B, T, N, D), dtype)
    return functools.partial(function, **options), (rows, rows)


def additive(hidden: int, dtype: str = "bfloat16") -> regard.Score:
    return regard.Additive(None, None, jnp.ones(hidden, dtype), tolerance="exact")


def calls() -> dict[str, Call]:
    """By name; compiled forward, and with gradients."""
    found = {}
    for D in (64, 128, 256, 512):
        sizes = (8, 1, 32768, 32, 8, D, D)
        found[f"decode dot {D}"] = attention(*sizes)
        found[f"decode gaussian {D}"] = attention(*sizes, score=regard.Gaussian(8.0))
        found[f"decode paged dot {D}"] = paged(256, 32, 8, D)
        found[f"decode paged gaussian {D}"] = paged(256, 32, 8, D, score=regard.Gaussian(8.0))
    for D in (64, 128, 256):
        found[f"decode float32 dot {D}"] = attention(8, 1, 32768, 32, 8, D, D, "float32")
    found["decode dot 128, 32 rows"] = attention(8, 4, 32768, 64, 8, 128, 128)
    for h in (64, 256, 512):
        found[f"decode additive {h}"] = attention(64, 1, 4096, 1, 1, h, h, score=additive(h))
    found["decode float32 additive 256"] = attention(
        64, 1, 4096, 1, 1, 256, 256, "float32", score=additive(256, "float32")
    )
    for h in (64, 256):
        found[f"short additive {h}"] = attention(64, 50, 50, 1, 1, h, 512, score=additive(h))
    for D in (64, 128, 256):
        score = regard.Dot() + regard.Alibi(two_sided=True)
        found[f"by distance {D}"] = attention(4, 4096, 4096, 16, 16, D, D, score=score)
    found["by distance float32 64"] = attention(
        4, 4096, 4096, 16, 16, 64, 64, "float32", score=score
    )
    found["soft cap 64"] = attention(4, 4096, 4096, 16, 16, 64, 64, softcap=30.0)
    for D in (64, 128):
        for regime in (regard.Sparsemax(), regard.Hard(True), regard.Kernel(jax.nn.softplus)):
            name = f"{type(regime).__name__.lower()} {D}"
            found[name] = attention(2, 4096, 4096, 16, 16, D, D, normalize=regime)
    return found


def summaries() -> dict[str, Call]:
    """By name; compiled forward: derivatives are plain XLA."""
    found = {}
    for D, dtype in ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32")):
        for function in (regard.summarize, regard.attention_map):
            for name, mask in (("", None), (" causal", regard.Mask.causal())):
                made = summary_of(function, 2, 4096, 16, D, dtype, mask=mask)
                found[f"summary {function.__name__}{name} {D} {dtype}"] = made
    return found


class Kernel(NamedTuple):
    name: str
    grid: tuple[int, ...]
    warps: int
    stages: int
    text: str


def kernels(function: Callable, shapes: tuple[Any, ...]) -> list[Kernel]:
    """The kernels of a program, lowered for a GPU that is not here."""
    lower, modules = lowering.lower_jaxpr_to_triton_module, []

    def recorded(jaxpr: Any, *rest: Any, **more: Any) -> Any:
        result = lower(jaxpr, *rest, **more)
        modules.append((result.grid, result.module.operation.get_asm()))
        return result

    lowering.lower_jaxpr_to_triton_module = recorded
    try:
        text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    finally:
        lowering.lower_jaxpr_to_triton_module = lower
    sizes = re.findall(r"num_stages = (\d+) : i32, num_warps = (\d+) : i32", text)
    return [
        Kernel(_name(asm), tuple(grid), int(warps), int(stages), asm)
        for (grid, asm), (stages, warps) in zip(modules, sizes, strict=True)
    ]


def _name(asm: str) -> str:
    found = re.search(r"tt.func public @(\w+)", asm)
    return found[1] if found else "?"


def report(kernel: Kernel, capability: int) -> str:
    """One line: what the compiler made of it."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ttir", Path(folder) / "kernel.cubin"
        source.write_text(kernel.text)
        start = time.process_time()
        made = triton.compile(
            str(source),
            target=GPUTarget("cuda", capability, 32),
            options=dict(num_warps=kernel.warps, num_stages=kernel.stages),
        )
        seconds = time.process_time() - start
        binary.write_bytes(made.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run(
            [tool, "--dump-resource-usage", binary], capture_output=True, text=True
        )
    used = dict(re.findall(r"(REG|STACK):(\d+)", said.stdout))
    return (
        f"  {kernel.name:24} grid {kernel.grid!s:18} warps {kernel.warps} stages {kernel.stages} "
        f"registers {used.get('REG', '?'):>3} stack {used.get('STACK', '?'):>4} "
        f"shared {made.metadata.shared:>6} compiled in {seconds:.1f} s"
    )


def with_gradients(attend: Callable[..., Array]) -> Callable:
    def gradients(query: Array, key: Array, value: Array, lens: Array) -> Any:
        loss = lambda *arrays: attend(*arrays, lens).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, argnums=(0, 1, 2))(query, key, value)

    return gradients


def lines(pattern: str, capability: tuple[int, int]) -> Iterator[str]:
    number = 10 * capability[0] + capability[1]
    pooled = calls()
    for name, (call, shapes) in (pooled | summaries()).items():
        if pattern not in name:
            continue
        yield name
        seen = set()
        for function in (call, with_gradients(call)) if name in pooled else (call,):
            for kernel in kernels(function, shapes):
                if kernel.text not in seen:
                    yield report(kernel, number)
                seen.add(kernel.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pattern", nargs="?", default="", help="only calls whose name has this")
    parser.add_argument("--capability", default="9.0", help="of the GPU (default: %(default)s)")
    chosen = parser.parse_args()
    major, minor = map(int, chosen.capability.split("."))
    placement._described = lambda device: Device("gpu", (major, minor))  # the GPU that is not here
    with_a_gpu(10 * major + minor)
    for line in lines(chosen.pattern, (major, minor)):
        print(line, flush=True)


def with_a_gpu(capability: int) -> None:
    """As of JAX 0.11, Pallas asks the GPU for its capability when it lowers."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    try:
        from jax._src.pallas.triton import gpu_info
    except ImportError:
        return
    gpu_info.get_gpu_info = lambda: NamedTuple("Info", [("compute_capability", int)])(capability)


if __name__ == "__main__":
    main()
