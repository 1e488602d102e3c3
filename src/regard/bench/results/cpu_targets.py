"""What is promised on a CPU: ratios of one run, never absolute times."""

from regard.bench.results.targets import Target, cheaper, faster, within

CPU_TARGETS = (
    faster("additive 1e-3 vs book, forward", "additive_book_1e-3", "book", 4.0),
    faster("additive 1e-3 vs book, forward+backward", "additive_book_1e-3_backward", "book", 4.0),
    faster("additive default vs book, forward", "additive_book", "book", 2.0),
    faster("additive default vs book, forward+backward", "additive_book_backward", "book", 2.0),
    faster("dot product vs jax.nn, forward", "dot_heads", "jax.nn", 2.5),
    faster("dot product vs jax.nn, forward+backward", "dot_heads_backward", "jax.nn", 2.5),
    faster("dot product vs torch, forward", "dot_heads", "torch", 0.9),
    faster("dot product vs torch, forward+backward", "dot_heads_backward", "torch", 0.9),
    cheaper("causal over unmasked, T=4096", "causal_4096", ("full_4096", "regard"), 0.65),
    Target(
        "guarded lift over bare",
        (("additive_guard", "lift"),),
        ("additive_guard", "unguarded"),
        1.05,
        at_least=False,
    ),
    cheaper("Gaussian over dot product", "gaussian_heads", ("dot_heads", "regard"), 1.1),
    cheaper("bilinear over dot product", "bilinear_heads", ("dot_heads", "regard"), 1.1),
    within("additive training at 16384, temporaries", "memory_16384", 1024.0, "MiB"),
    cheaper(
        "additive training, 16384 over 8192",
        "memory_16384",
        ("memory_8192", "regard"),
        2.3,
        "MiB",
    ),
)
