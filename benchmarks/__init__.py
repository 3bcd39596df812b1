"""The functional step against the imperative loop: `python -m benchmarks`. See docs/performance.md."""
