"""How the costs of a job grow: with layers, parameters, vocabulary, ranks, steps, corpus and samples.

Every cost is measured at several sizes n, each in a process of its own, and fitted as T = a + b·nᵏ (`fit`). A cost
whose k is above 1.15, so clearly that its whole interval is, fails the benchmark.

    python -m benchmarks.growth                  everything
    python -m benchmarks.growth layers steps     a part
"""
