"""How a step runs: where its results lie, what a compiler sees, which kernels do the arithmetic."""
