"""PaRO: which strategy to take, by the formulas of the paper."""
