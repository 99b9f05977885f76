"""Loss valleys, the line through two models, curvature: what a run, a checkpoint or a file of weights has learnt."""
