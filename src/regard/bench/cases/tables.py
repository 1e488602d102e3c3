"""The named problems of the benchmark: float32 for two CPU cores, bfloat16 for one GPU.

The promises in results/targets.py say why each of them is here. A table has a case on each line:
its name and the fields of its `Case`, where S is T, V is D and `group` is the name unless given.
A line that begins with * has fields of all lines below it. `both` adds the same case with
gradients, as `<name>_backward`; `within=F/G` also limits the two, in ms on one H200.
"""

import ast
from typing import Any

from regard.bench.cases.case import Case

LIMITS: dict[str, float] = {}  # ms, of the cases that have one


def cases_of(table: str, **common: Any) -> list[Case]:
    """The cases of a table.

    >>> table = "* score=dot B=2 T=8\\ntiny D=4 N=2 against=jax.nn,jax.nn+cudnn both"
    >>> for case in cases_of(table):
    ...     print(case.name, case.S, case.V, case.against, case.direction)
    tiny 8 4 ('jax.nn', 'jax.nn cudnn') forward
    tiny_backward 8 4 ('jax.nn', 'jax.nn cudnn') forward+backward
    """
    found: list[Case] = []
    shared: dict[str, Any] = {}
    for line in table.strip().splitlines():
        name, *words = line.split()
        given = {key: _value(key, text) for key, _, text in (word.partition("=") for word in words)}
        if name == "*":
            shared = given
            continue
        fields = common | shared | given
        limits = str(fields.pop("within", "")).split("/")
        both = fields.pop("both", None) is not None or len(limits) == 2
        fields = {"S": fields["T"], "V": fields["D"], "group": name} | fields
        for suffix, limit in zip(("", "_backward"), filter(None, limits), strict=False):
            LIMITS[name + suffix] = float(limit)
        found.append(Case(name, **fields))
        if both:
            again = dict(direction="forward+backward", group=f"{fields['group']}_backward")
            found.append(Case(f"{name}_backward", **fields | again))
    return found


def _value(key: str, text: str) -> Any:
    if key == "against":
        return tuple(name.replace("+", " ") for name in filter(None, text.split(",")))
    try:
        return text if key == "within" else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


CPU_SWEEP_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
LONGEST_BOOK = 4096  # at 8192 the book's (T, S, h) tensor takes 16 GiB

# The book's problem at each tolerance is one group: peers are timed once for all three. Of the cost
# of the guard 5 % must be distinguished from noise, so it has many more rounds.
_CPU = """
* score=additive B=4 T=512 D=64 against=book,keras,torch
additive_book                group=additive rounds=5
additive_book_1e-3           group=additive rounds=5 tolerance=1e-3
additive_book_exact          group=additive rounds=5 tolerance=exact
additive_book_backward       group=additive_backward rounds=5 direction=forward+backward
additive_book_1e-3_backward  group=additive_backward rounds=5 direction=forward+backward tolerance=1e-3
additive_book_exact_backward group=additive_backward rounds=5 direction=forward+backward tolerance=exact
additive_lengths             mask=lengths
additive_guard               group=guard against=lift,unguarded rounds=30
* B=2 T=1024 N=8 D=64 rounds=10
dot_heads                    score=dot group=heads against=jax.nn,keras,torch
gaussian_heads               score=gaussian group=heads
bilinear_heads               score=bilinear group=heads
dot_heads_backward           score=dot group=heads_backward direction=forward+backward against=jax.nn,keras,torch
* score=dot B=1 T=4096 N=4 D=64 group=skipping rounds=5
full_4096                    against=jax.nn,torch
causal_4096                  against=jax.nn,torch mask=causal
lengths_4096                 against=jax.nn,torch mask=lengths
triangular_4096              against=jax.nn mask=triangular
"""  # noqa: E501

# Additive attention against length: timed forward, and the memory of training, compiled but not
# run, with valid lengths given. From 8192 on a run is long enough to be its own average.
_CPU_SWEEP = """
* score=additive B=1 T={T} D=64 against={against}
sweep_{T}                    seconds=5.0 rounds={rounds}
sweep_{T}_1e-3               seconds=5.0 rounds={rounds} group=sweep_{T} tolerance=1e-3
memory_{T}                   group=memory mask=lengths direction=forward+backward timed=False
"""

CPU_CASES = (
    *cases_of(_CPU),
    *(
        case
        for T in CPU_SWEEP_LENGTHS
        for case in cases_of(
            _CPU_SWEEP.format(
                T=T, rounds=3 if T <= 4096 else 1, against="book" if T <= LONGEST_BOOK else ""
            )
        )
    ),
)

GPU_SWEEP_LENGTHS = tuple(2**power for power in range(10, 18))  # 1k to 128k
LONG = 32768  # from here on a run is long enough to be its own average
LINEAR_LENGTHS = (8192, 16384)  # the exact kernel's memory is compared at these
JAX_PEERS = ("jax.nn", "jax.nn cudnn")

# Additive attention at three tolerances, at a length at which more rows are affordable in float64,
# and with many hidden units; sixteen heads; dot products so short that a launch outlasts them, and
# long ones; the wide kernel alone, on features of the widths that the additive lift makes.
_GPU = """
* score=additive B=8 T=4096 D=64 against=book
additive
additive_2e-2                group=additive tolerance=2e-2
additive_exact               group=additive tolerance=exact
additive_backward            direction=forward+backward
additive_exact_backward      group=additive_backward direction=forward+backward tolerance=exact
additive_256                 D=256
error_1024                   T=1024
error_1024_2e-2              T=1024 group=error_1024 tolerance=2e-2
error_1024_exact             T=1024 group=error_1024 tolerance=exact
* score=dot B=4 T=4096 N=16 D=128 group=heads_128
dot_128                      both against=jax.nn,jax.nn+cudnn,torch,flex
causal_128                   both against=jax.nn,jax.nn+cudnn,torch,flex mask=causal
gaussian_128                 score=gaussian
bilinear_128                 score=bilinear
* score=dot B=4 T=4096 N=16 D=64 group=heads_64 both
dot_64                       against=jax.nn,jax.nn+cudnn,torch
causal_64                    against=jax.nn,jax.nn+cudnn,torch mask=causal
lengths_64                   against=jax.nn,jax.nn+cudnn,torch mask=lengths
triangular_64                against=jax.nn,jax.nn+cudnn,torch,flex mask=triangular
* score=dot N=8 both against=jax.nn,jax.nn+cudnn,torch
dot_short                    B=8 T=512 D=64
dot_long                     B=1 T=16384 D=128
* score=features B=8 T=4096 V=64 group=kernel
kernel_768                   D=768
kernel_896                   D=896
kernel_1024                  D=1024
kernel_3072                  D=3072 V=256
kernel_3584                  D=3584 V=256
kernel_768_backward          D=768 group=kernel_backward direction=backward
kernel_896_backward          D=896 group=kernel_backward direction=backward
kernel_1024_backward         D=1024 group=kernel_backward direction=backward
"""

# Additive attention against length, and a dot product by cuDNN beside it for scale.
_GPU_SWEEP = """
* B=1 T={T} D=64 group=sweep_{T} rounds={rounds}
sweep_{T}                    score=additive against=book
sweep_dot_{T}                score=dot N=1 against=jax.nn+cudnn
sweep_{T}_backward           score=additive against=book direction=forward+backward
sweep_dot_{T}_backward       score=dot N=1 against=jax.nn+cudnn direction=forward+backward
"""

# The exact additive kernel, compiled and not run: its memory is linear.
_LINEAR = """
* score=additive B=1 D=64 tolerance=exact group=memory timed=False direction=forward+backward
memory_exact_{T}             T={T}
"""

# Beside the benchmark's own cases, where round 1 was several times slower than plain JAX: section 7
# of the design has what was measured then, and the limits.
_CLIFFS = """
* score=dot T=1 mask=full against=jax.nn,jax.nn+cudnn
one_query                    B=8 S=32768 N=32 K=8 D=128 within=0.28
one_query_long               B=1 S=131072 N=32 K=8 D=128 within=0.15
one_query_short              B=64 S=2048 N=16 K=16 D=64 within=0.145
* score=gaussian T=1 mask=full
one_query_gaussian           B=8 S=32768 N=32 K=8 D=128 within=0.322
one_query_long_gaussian      B=1 S=131072 N=32 K=8 D=128 within=0.1725
one_query_short_gaussian     B=64 S=2048 N=16 K=16 D=64 within=0.16675
* score=additive against=book
one_query_additive           B=64 T=1 S=4096 D=256 within=0.10/0.35
sentences_additive           B=64 T=50 D=256 V=512 within=0.09/0.25
float32_additive             B=8 T=2048 D=64 dtype=float32 within=1.0/5.0
* score=dot B=2 T=4096 N=16 D=64
float32_dot                  dtype=float32 against=jax.nn within=1.0/3.5
bias                         bias=True against=jax.nn,jax.nn+cudnn within=0.58/3.5
packed                       T=8192 mask=packed against=flex within=0.25/0.9
dropout                      dropout=0.1 against=torch within=0.64/2.4
sparsemax                    normalize=sparsemax within=2.5/6.0
hard                         normalize=hard within=0.6/1.5
"""

_ON_GPU: dict[str, Any] = dict(dtype="bfloat16", device="gpu", rounds=7, seconds=3.0)
_SWEPT = "\n".join(
    _GPU_SWEEP.strip().format(T=T, rounds=3 if T >= LONG else 5) for T in GPU_SWEEP_LENGTHS
)
GPU_CASES = (
    *cases_of(_GPU, **_ON_GPU),
    *cases_of(_SWEPT, **_ON_GPU),
    *(case for T in LINEAR_LENGTHS for case in cases_of(_LINEAR.format(T=T), **_ON_GPU)),
    *cases_of(_CLIFFS, **_ON_GPU | dict(rounds=5, seconds=1.0)),
)
