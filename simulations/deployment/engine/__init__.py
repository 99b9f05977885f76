"""The SuperLink engine: the nodes of a run, its submission, its ServerApp."""
