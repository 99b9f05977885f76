"""The SuperLink engine: a run's nodes, its submission, its ServerApp."""
