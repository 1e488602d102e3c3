"""The peers that run on torch: scaled_dot_product_attention, FlexAttention, and the book's form.

On a GPU they are read by CUDA's own events, and short ones as CUDA graphs.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from regard.bench.cases.case import Case, Inputs, dense_mask
from regard.bench.peers.program import BUNDLED, MASKED, Absent, Program, import_peer, needs_memory
from regard.bench.run.timing import Queued, Run

COMPILED_MASKS = 64  # FlexAttention is compiled once for each shape and mask, and torch counts


def build_torch(case: Case, inputs: Inputs) -> Program:
    """torch: scaled_dot_product_attention, or the book's additive form, eager."""
    torch = import_peer("torch")
    if case.score not in ("dot", "additive"):
        raise Absent(f"torch has no {case.score} attention")
    if case.normalize != "softmax" or (case.dropout and case.score != "dot"):
        raise Absent("torch's attention has softmax only, and its additive form no dropout")
    if case.mask == "causal" and case.bias:
        raise Absent("torch's attention takes causal order or a bias, not both")
    if case.score == "additive" and (case.N is not None or case.mask == "causal"):
        raise Absent("torch's additive form is the book's: no heads, valid lengths")
    if case.score == "additive":
        needs_memory(case)
    arrays = _Tensors(torch, case, inputs)
    tensors, mask = arrays.tensors, None
    if case.mask not in ("none", "causal"):
        mask = torch.from_numpy(np.array(dense_mask(case, inputs.valid_lens))).to(arrays.device)
        mask = mask if arrays.heads_first else mask[:, 0]

    def forward():
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        if case.score == "dot":
            pairs = mask
            if case.bias:
                pairs = tensors["bias"] if case.N is not None else tensors["bias"][:, None]
                pairs = pairs if mask is None else pairs.masked_fill(~mask, float("-inf"))
            return torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=pairs,
                is_causal=case.mask == "causal",
                enable_gqa=case.K is not None,
                dropout_p=case.dropout,
            )
        queries, keys = query @ tensors["query_kernel"], key @ tensors["key_kernel"]
        features = torch.tanh(queries.unsqueeze(2) + keys.unsqueeze(1))  # [B, T, S, h]
        scores = features @ tensors["vector"]
        if case.bias:
            scores = scores + tensors["bias"]
        if mask is not None:
            scores = scores.masked_fill(~mask, MASKED)
        return torch.softmax(scores, dim=-1) @ value

    return _program(torch, case, inputs, arrays, forward)


def build_flex(case: Case, inputs: Inputs) -> Program:
    """FlexAttention: a mask as a function, compiled into the kernel; whole blocks are skipped.

    Its score may be changed by a function of the finished dot product, not made another way.
    """
    torch = import_peer("torch")
    flex = import_peer("torch.nn.attention.flex_attention")
    if case.score != "dot":
        raise Absent(f"FlexAttention changes dot products and cannot make {case.score} scores")
    if case.backward and case.device == "cpu":
        raise Absent("FlexAttention has no backward pass on a CPU")
    if case.dropout or case.normalize != "softmax":
        raise Absent("FlexAttention has no dropout and no other regime than softmax")
    if case.bias or case.K is not None or case.mask in ("segments", "boolean", "full"):
        raise Absent("FlexAttention is measured without bias, key heads and this mask")
    arrays = _Tensors(torch, case, inputs)
    attention = flex.flex_attention
    if case.device == "gpu":
        # Past its limit torch would quietly run the uncompiled function.
        torch._dynamo.config.recompile_limit = COMPILED_MASKS
        attention = torch.compile(attention, dynamic=False)
    block_mask = None
    if case.mask != "none":
        lens: Any = inputs.valid_lens
        if lens is not None:
            lens = torch.from_numpy(lens).to(arrays.device)
        sees = {
            "causal": lambda b, n, t, s: s <= t + (case.S - case.T),
            "lengths": lambda b, n, t, s: s < lens[b],
            "triangular": lambda b, n, t, s: s < lens[b, t],
            "packed": lambda b, n, t, s: (lens[b, t] == lens[b, s]) & (s <= t),
        }[case.mask]
        examples = None if lens is None else case.B
        block_mask = flex.create_block_mask(
            sees, examples, None, case.T, case.S, device=arrays.device
        )

    def forward():
        query, key, value = (arrays.tensors[name] for name in ("query", "key", "value"))
        return attention(query, key, value, block_mask=block_mask)

    return _program(torch, case, inputs, arrays, forward)


class _Tensors:
    """The arrays of a case as tensors on its device.

    Dot products want [B, N, T, D]; they get contiguous arrays of that layout, made beforehand.
    """

    def __init__(self, torch: Any, case: Case, inputs: Inputs):
        self.torch, self.case = torch, case
        self.heads_first = case.score == "dot"
        self.device = "cuda" if case.device == "gpu" else "cpu"
        self.tensors = {
            name: self.to_torch(array, name != "bias").requires_grad_(case.backward)
            for name, array in inputs.arrays.items()
        }

    def to_torch(self, array: np.ndarray, rows: bool = True) -> Any:
        torch = self.torch
        if array.dtype.name == "bfloat16":  # which torch has and NumPy has not
            tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        tensor = tensor.to(self.device)
        if self.heads_first and rows:
            tensor = tensor[:, :, None] if self.case.N is None else tensor
            tensor = tensor.transpose(1, 2).contiguous()
        return tensor

    def to_numpy(self, tensor: Any, rows: bool = True) -> np.ndarray:
        array = tensor.detach().to(self.torch.float64).cpu().numpy()
        if self.heads_first and rows:
            array = array.swapaxes(1, 2)
            array = array[:, :, 0] if self.case.N is None else array
        return array


def _program(
    torch: Any, case: Case, inputs: Inputs, arrays: _Tensors, forward: Callable[[], Any]
) -> Program:
    """The program of a forward function, in the direction of the case."""

    def run_under(cotangent):
        if not case.backward:
            with torch.no_grad():
                return forward(), ()
        out = forward()
        return out, torch.autograd.grad(out, list(arrays.tensors.values()), cotangent)

    cotangent = arrays.to_torch(inputs.cotangent)

    def outputs():
        out, grads = run_under(arrays.to_torch(inputs.checked_cotangent))
        results = {"out": out} | {
            f"d_{name}": grad for name, grad in zip(arrays.tensors, grads, strict=False)
        }
        return {
            name: inputs.checked(name, arrays.to_numpy(result, name != "d_bias"))
            for name, result in results.items()
        }

    def run():
        return run_under(cotangent)

    if case.device == "cpu":
        return Program(_queued_on_cpu(run), outputs)
    temp_bytes, result_bytes = _cuda_memory(torch, run)
    argument_bytes = sum(tensor.nbytes for tensor in (*arrays.tensors.values(), cotangent))
    peak_bytes = argument_bytes + result_bytes + temp_bytes
    return Program(_queued_on_cuda(torch, run), outputs, temp_bytes, peak_bytes)


def _queued_on_cpu(run: Run) -> Queued:
    def burst(runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            run()
        return time.perf_counter() - start

    return Queued(run, burst)


def _queued_on_cuda(torch: Any, run: Run) -> Queued:
    def burst_of(launch: Run) -> Callable[[int], float]:
        def burst(runs: int) -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(runs):
                launch()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        return burst

    def once():
        result = run()
        torch.cuda.synchronize()
        return result

    def bundle():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(BUNDLED):
                run()
        return burst_of(graph.replay)

    return Queued(once, burst_of(run), bundle, BUNDLED)


def _cuda_memory(torch: Any, run: Run) -> tuple[int, int]:
    """Bytes of temporaries, and of results, as the allocator saw them in one run."""
    run()  # compiles, and takes what stays
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = run()
    torch.cuda.synchronize()
    result_bytes = torch.cuda.memory_allocated() - before
    temp_bytes = torch.cuda.max_memory_allocated() - before - result_bytes
    del results
    return temp_bytes, result_bytes
