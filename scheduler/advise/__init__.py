"""Whether to split, and how: plans compared by simulation, each tuned."""
