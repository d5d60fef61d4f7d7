"""One page on one or several runs: what ran, how it went, what it learned."""
