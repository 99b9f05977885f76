"""Recipe on PaRO: which strategy to choose, by the paper's formulas."""
